package modelcard

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"lukechampine.com/blake3"

	"dynworker/pkg/protocol"
)

// ErrNoSum is a card whose checksum cannot be computed here.
var ErrNoSum = errors.New("checksum of this card is not known")

// workerTypeCodes are the bytes that stand for worker types in the checksum.
var workerTypeCodes = map[string]byte{"": 0, "prefill": 1, "decode": 2, "encode": 3, "aggregated": 4}

// Sum is the checksum by which frontends of Dynamo 1.6.1 group workers of one
// model ("mdcsum"): workers with another checksum than the first one get no
// requests. Nothing but a log line depends on it here; it lets an operator see
// why a replica is left out. It was compared with the names of the folders in
// which the frontend caches a card's files.
//
// Cards with a router config, an indexer identity or a prompt context are
// ErrNoSum: a frontend hashes its own rendering of them.
func Sum(c *protocol.Card) (string, error) {
	for _, f := range []struct {
		name string
		raw  []byte
	}{{"router_config", c.RouterConfig}, {"indexer_identity", c.IndexerIdentity}, {"prompt_context", c.PromptContext}} {
		if len(f.raw) > 0 && string(f.raw) != "null" {
			return "", fmt.Errorf("%w: it has a %s", ErrNoSum, f.name)
		}
	}
	var b []byte
	b = append(b, c.DisplayName...)
	b = append(b, c.SourcePath...)
	for _, f := range []*protocol.TaggedFile{c.ModelInfo, c.Tokenizer, c.PromptFormatter} {
		if f != nil {
			b = append(b, f.File.Checksum...)
		}
	}
	if c.ChatTemplate != nil {
		b = append(b, c.ChatTemplate.File.Checksum...)
	}
	if c.GenConfig != nil {
		b = append(b, c.GenConfig.File.Checksum...)
	}
	b = appendExtras(b, c.ExtraFiles)
	b = binary.BigEndian.AppendUint32(b, effectiveContext(c))
	b = binary.BigEndian.AppendUint32(b, c.KVCacheBlockSize)
	code, err := workerTypeCode(c.WorkerType)
	if err != nil {
		return "", err
	}
	b = append(b, code)
	b = binary.BigEndian.AppendUint32(b, uint32(len(c.Needs)))
	for _, all := range c.Needs {
		b = binary.BigEndian.AppendUint32(b, uint32(len(all)))
		for _, worker := range all {
			if code, err = workerTypeCode(worker); err != nil {
				return "", err
			}
			b = append(b, code)
		}
	}
	if len(c.Aliases) > 0 {
		b = binary.BigEndian.AppendUint32(b, uint32(len(c.Aliases)))
		for _, alias := range c.Aliases {
			b = binary.BigEndian.AppendUint32(b, uint32(len(alias)))
			b = append(b, alias...)
		}
	}
	sum := blake3.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

func workerTypeCode(name string) (byte, error) {
	code, ok := workerTypeCodes[name]
	if !ok {
		return 0, fmt.Errorf("%w: worker type %q", ErrNoSum, name)
	}
	return code, nil
}

// appendExtras adds the side files by name and digest; of a URL the name is
// the last segment as it stands there, escapes and all.
func appendExtras(b []byte, files []protocol.File) []byte {
	type extra struct{ name, digest string }
	extras := make([]extra, 0, len(files))
	for _, f := range files {
		extras = append(extras, extra{path.Base(f.Path), strings.TrimPrefix(f.Checksum, checksumPrefix)})
	}
	slices.SortFunc(extras, func(x, y extra) int {
		return cmp.Or(strings.Compare(x.name, y.name), strings.Compare(x.digest, y.digest))
	})
	for _, e := range extras {
		b = append(b, e.name...)
		b = append(b, 0)
		b = append(b, e.digest...)
	}
	return b
}
