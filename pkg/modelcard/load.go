package modelcard

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"lukechampine.com/blake3"
)

// Names of files in a model folder.
const (
	nameConfig           = "config.json"
	nameTokenizer        = "tokenizer.json"
	nameTikToken         = "tiktoken.model"
	nameTokenizerConfig  = "tokenizer_config.json"
	nameGenerationConfig = "generation_config.json"
	nameSpecialTokensMap = "special_tokens_map.json"
	nameTemplate         = "chat_template.jinja"
	nameTemplateJSON     = "chat_template.json"
	nameReadme           = "README.md"
)

// Default bounds of [Options]. The largest tokenizers of today have some
// 40 MB; what a frontend refuses anyhow is a file of more than 1 GiB.
const (
	DefaultMaxFile  = 128 << 20
	DefaultMaxExtra = 32 << 20
	DefaultMaxTotal = 256 << 20
)

// Options bound what [Load] reads.
type Options struct {
	// CustomTemplate is the path of a chat template to use in place of the
	// model's own; empty means the model's own. With the suffix .json it is
	// read as a JSON file with the key "chat_template", otherwise as Jinja.
	CustomTemplate string
	// LocalOnly says that the files will not be served, only named by path:
	// their bytes are dropped after hashing and side files are not looked at
	// (a frontend takes those from the folder by itself).
	LocalOnly bool
	// MaxFile bounds each file that the card has a slot for, MaxExtra each side
	// file, MaxTotal all of them together, in bytes; zero means the defaults.
	// A slot file over a bound is an error, a side file is left out.
	MaxFile, MaxExtra, MaxTotal int64
}

// Model is a model folder that was read.
type Model struct {
	dir       string // absolute
	localOnly bool

	config, tokenizer, tokenizerConfig, template, generation *file
	templateCustom                                           bool
	extras                                                   []*file // sorted by name
	skipped                                                  []Skipped
	facts                                                    Facts
}

// file is a file as it was read.
type file struct {
	name     string // basename, as the frontend will know it
	path     string // absolute
	data     []byte // nil after loading when the files are not served
	size     int64
	checksum string // "blake3:HEX"
}

func (f *file) bytes() []byte {
	if f == nil {
		return nil
	}
	return f.data
}

// Skipped is a side file that the card will not name.
type Skipped struct {
	Name   string
	Reason string
}

// FileInfo describes one file of the card.
type FileInfo struct {
	Name     string // the last segment of its URL
	Path     string // where it was read
	Size     int64
	Checksum string // "blake3:HEX"
	Extra    bool   // a side file, without a slot of its own
}

// weightSuffixes are the suffixes that the frontend of Dynamo 1.6.1 takes for
// weights, then those of other formats that hold nothing else.
var weightSuffixes = []string{
	".safetensors", ".bin", ".gguf", ".onnx", ".tflite", ".h5", ".pt", ".pth", ".msgpack",
	".ckpt", ".engine", ".plan", ".npz", ".nemo", ".distcp",
}

// isWeights also takes upper case for weights, which Dynamo does not.
func isWeights(name string) bool {
	return slices.Contains(weightSuffixes, strings.ToLower(filepath.Ext(name)))
}

// Load reads a model folder. It fails with an [*Error] when the model could not
// be served at all; what is missing only for some endpoints shows when the card
// is made.
func Load(dir string, o Options) (*Model, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, &Error{Kind: ErrNoFolder, Dir: dir, Problem: "has no absolute path", Err: err}
	}
	l := loader{m: &Model{dir: abs, localOnly: o.LocalOnly}, o: o}
	l.o.MaxFile = orDefault(o.MaxFile, DefaultMaxFile)
	l.o.MaxExtra = orDefault(o.MaxExtra, DefaultMaxExtra)
	l.o.MaxTotal = orDefault(o.MaxTotal, DefaultMaxTotal)
	if err := l.load(); err != nil {
		return nil, err
	}
	return l.m, nil
}

func orDefault(n, def int64) int64 {
	if n <= 0 {
		return def
	}
	return n
}

// loader carries the state of one Load.
type loader struct {
	m     *Model
	o     Options
	names []string // of the regular files in the folder, sorted
	total int64
}

func (l *loader) load() error {
	m := l.m
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		problem := "cannot be read"
		if errors.Is(err, fs.ErrNotExist) {
			problem = "does not exist"
		}
		return &Error{Kind: ErrNoFolder, Dir: m.dir, Problem: problem, Err: err}
	}
	for _, e := range entries {
		// Stat follows links: a downloaded model is a folder of links into a
		// store of blobs.
		if st, err := os.Stat(filepath.Join(m.dir, e.Name())); err == nil && st.Mode().IsRegular() {
			l.names = append(l.names, e.Name())
		}
	}
	slices.Sort(l.names)

	if err := l.readSlots(); err != nil {
		return err
	}
	var specialTokensMap []byte
	if slices.Contains(l.names, nameSpecialTokensMap) {
		f, err := read(filepath.Join(m.dir, nameSpecialTokensMap), l.o.MaxFile)
		if err != nil {
			return l.readError(nameSpecialTokensMap, err)
		}
		specialTokensMap = f.data
	}
	if err := m.gather(specialTokensMap); err != nil {
		return err
	}
	if m.localOnly {
		for _, f := range m.slots() {
			f.data = nil
		}
		return nil
	}
	return l.readExtras()
}

// readSlots reads the files that a card has slots for.
func (l *loader) readSlots() (err error) {
	m := l.m
	if m.config, err = l.slot(nameConfig); err != nil {
		return err
	}
	if m.config == nil {
		return &Error{Kind: ErrNoConfig, Dir: m.dir, File: nameConfig, Problem: "is missing",
			Consequence: "a frontend would refuse to build the model and try again for ever"}
	}
	tokenizer, err := l.tokenizerName()
	if err != nil {
		return err
	}
	if m.tokenizer, err = l.slot(tokenizer); err != nil {
		return err
	}
	if m.tokenizer.name == nameTokenizer && !json.Valid(m.tokenizer.data) {
		return m.bad(nameTokenizer, "is not valid JSON", nil)
	}
	if m.tokenizerConfig, err = l.slot(nameTokenizerConfig); err != nil {
		return err
	}
	if m.generation, err = l.slot(nameGenerationConfig); err != nil {
		return err
	}
	return l.readTemplate()
}

// tokenizerName chooses as the frontend's own loader does.
func (l *loader) tokenizerName() (string, error) {
	for _, name := range []string{nameTokenizer, nameTikToken} {
		if slices.Contains(l.names, name) {
			return name, nil
		}
	}
	var found []string
	for _, name := range l.names {
		if filepath.Ext(name) == ".tiktoken" {
			found = append(found, name)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return "", &Error{Kind: ErrNoTokenizer, Dir: l.m.dir, File: nameTokenizer,
			Problem:     "is missing, and there is neither " + nameTikToken + " nor a file *.tiktoken",
			Consequence: "a frontend would have no tokenizer and never list the model"}
	default:
		return "", &Error{Kind: ErrAmbiguousTokenizer, Dir: l.m.dir, File: strings.Join(found, ", "),
			Problem: "several tokenizers and no way to tell which is meant"}
	}
}

// readTemplate reads the chat template that stands in a file of its own, the
// operator's or the model's.
func (l *loader) readTemplate() (err error) {
	m := l.m
	if l.o.CustomTemplate == "" {
		for _, name := range []string{nameTemplate, nameTemplateJSON} {
			if m.template, err = l.slot(name); err != nil || m.template != nil {
				return err
			}
		}
		return nil
	}
	path, err := filepath.Abs(l.o.CustomTemplate)
	if err == nil {
		m.template, err = l.read(path, l.o.MaxFile)
	}
	if err != nil {
		return l.readError(l.o.CustomTemplate, err)
	}
	m.templateCustom = true
	for _, f := range m.slots() {
		if f != m.template && f.name == m.template.name {
			return &Error{Kind: ErrDuplicateName, Dir: m.dir, File: l.o.CustomTemplate,
				Problem:     "the chat template has the name of another file of the model",
				Consequence: "a frontend keeps them in one folder, where one would replace the other"}
		}
	}
	return nil
}

// slot reads the named file of the folder; nil means that there is none.
func (l *loader) slot(name string) (*file, error) {
	if !slices.Contains(l.names, name) {
		return nil, nil
	}
	f, err := l.read(filepath.Join(l.m.dir, name), l.o.MaxFile)
	if err != nil {
		return nil, l.readError(name, err)
	}
	return f, nil
}

// read reads a file within the bounds and counts it.
func (l *loader) read(path string, limit int64) (*file, error) {
	f, err := read(path, min(limit, l.o.MaxTotal-l.total))
	if err != nil {
		return nil, err
	}
	l.total += f.size
	return f, nil
}

func (l *loader) readError(name string, err error) error {
	e := &Error{Kind: ErrBadFile, Dir: l.m.dir, File: name, Problem: "cannot be read", Err: err}
	if errors.Is(err, ErrTooLarge) {
		e.Kind, e.Problem = ErrTooLarge, "is too large to be kept in memory"
	}
	return e
}

// readExtras reads the side files. Which they are is part of the checksum by
// which a frontend groups workers, so the choice is that of Dynamo 1.6.1's
// worker, tried out: every regular file of the folder itself that is neither
// hidden, nor README.md, nor weights.
func (l *loader) readExtras() error {
	taken := make(map[string]bool)
	for _, f := range l.m.slots() {
		taken[f.name] = true
	}
	for _, name := range l.names {
		if taken[name] || strings.HasPrefix(name, ".") || name == nameReadme || isWeights(name) {
			continue
		}
		f, err := l.read(filepath.Join(l.m.dir, name), l.o.MaxExtra)
		switch {
		case errors.Is(err, ErrTooLarge):
			l.m.skipped = append(l.m.skipped, Skipped{name, err.Error()})
		case err != nil:
			return l.readError(name, err)
		default:
			l.m.extras = append(l.m.extras, f)
		}
	}
	return nil
}

// tooLargeError is a file over a bound.
type tooLargeError struct{ size, limit int64 }

func (e *tooLargeError) Error() string {
	return fmt.Sprintf("%d bytes, at most %d would be taken", e.size, max(e.limit, 0))
}

func (e *tooLargeError) Is(target error) bool { return target == ErrTooLarge }

// read reads and hashes a regular file of at most limit bytes.
func read(path string, limit int64) (*file, error) {
	// Before opening: that would wait for a writer if it were a pipe.
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file", path)
	}
	if st.Size() > limit {
		return nil, &tooLargeError{st.Size(), limit}
	}
	r, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data := make([]byte, st.Size()+1) // one more, to see the end
	n, err := io.ReadFull(r, data)
	if n == len(data) || err == nil || int64(n) < st.Size() && isEOF(err) {
		return nil, fmt.Errorf("%s changed while it was read", path)
	}
	if !isEOF(err) {
		return nil, err
	}
	data = data[:n]
	sum := blake3.Sum256(data)
	return &file{
		name:     filepath.Base(path),
		path:     path,
		data:     data,
		size:     int64(n),
		checksum: checksumPrefix + hex.EncodeToString(sum[:]),
	}, nil
}

func isEOF(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }

const checksumPrefix = "blake3:"

// slots lists the files that the card has slots for, in the order of the card.
func (m *Model) slots() []*file {
	var fs []*file
	for _, f := range []*file{m.config, m.tokenizer, m.tokenizerConfig, m.template, m.generation} {
		if f != nil {
			fs = append(fs, f)
		}
	}
	return fs
}

// Dir is the model folder as an absolute path.
func (m *Model) Dir() string { return m.dir }

// Facts tells what the files say about the model.
func (m *Model) Facts() Facts {
	f := m.facts
	f.Architectures = slices.Clone(f.Architectures)
	f.EOSTokenIDs = slices.Clone(f.EOSTokenIDs)
	return f
}

// Files lists the files that the card names, those with slots first.
func (m *Model) Files() []FileInfo {
	var infos []FileInfo
	add := func(f *file, extra bool) {
		infos = append(infos, FileInfo{Name: f.name, Path: f.path, Size: f.size, Checksum: f.checksum, Extra: extra})
	}
	for _, f := range m.slots() {
		add(f, false)
	}
	for _, f := range m.extras {
		add(f, true)
	}
	return infos
}

// Skipped lists the side files that were left out because of their size. They
// are worth a line in the log: a tokenizer might want one of them.
func (m *Model) Skipped() []Skipped { return slices.Clone(m.skipped) }
