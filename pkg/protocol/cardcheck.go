package protocol

import (
	"encoding/hex"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
)

// modelTypes are the flags that a frontend knows; an unknown one fails the card.
var modelTypes = []string{
	"Chat", "Completions", "Embedding", "TensorBased", "Prefill", "Images", "Audios", "Videos",
	"Realtime", "Classify", "Pooling", "Rerank",
}

var workerTypes = []string{WorkerAggregated, WorkerPrefill, WorkerDecode, WorkerEncode}

// Validate looks for what would make the frontend drop the card or fail to build
// a model from it. The frontend says so only in its own log, so the worker had
// better know first. The error is a *FieldError.
func (c *Card) Validate() error {
	bad := func(field, reason string) error { return &FieldError{Field: field, Reason: reason} }
	switch {
	case c.DisplayName == "":
		return bad("display_name", "empty")
	case c.Slug == "" || c.Slug != Slugify(c.Slug):
		return bad("slug", "not of a-z, 0-9, - and _, or begins with _")
	case c.KVCacheBlockSize == 0:
		return bad("kv_cache_block_size", "zero")
	case !slices.Contains([]string{"Tokens", "Text", "Tensor"}, c.ModelInput):
		return bad("model_input", "not Tokens, Text or Tensor")
	case c.WorkerType != "" && !slices.Contains(workerTypes, c.WorkerType):
		return bad("worker_type", "not a known role")
	case c.RuntimeConfig.DataParallelSize == 0:
		return bad("runtime_config.data_parallel_size", "zero")
	case c.ModelInput == ModelInputTokens && c.ModelInfo == nil:
		return bad("model_info", "missing")
	case c.ModelInput == ModelInputTokens && c.Tokenizer == nil:
		return bad("tokenizer", "missing")
	}
	if c.ModelType != "" {
		for flag := range strings.SplitSeq(c.ModelType, "|") {
			if !slices.Contains(modelTypes, strings.TrimSpace(flag)) {
				return bad("model_type", "holds an unknown flag")
			}
		}
	}
	for _, all := range c.Needs {
		for _, role := range all {
			if !slices.Contains(workerTypes, role) {
				return bad("needs", "holds an unknown role")
			}
		}
	}
	if err := c.validateFiles(); err != nil {
		return err
	}
	return c.validateRaw()
}

func (c *Card) validateFiles() error {
	files := map[string]*File{}
	for name, t := range map[string]*TaggedFile{
		"model_info": c.ModelInfo, "tokenizer": c.Tokenizer,
		"prompt_formatter": c.PromptFormatter, "gen_config": c.GenConfig,
	} {
		if t == nil {
			continue
		}
		if t.Kind == "" {
			return &FieldError{Field: name, Reason: "has no kind"}
		}
		files[name] = &t.File
	}
	if c.ChatTemplate != nil {
		files["chat_template_file"] = &c.ChatTemplate.File
	}
	for i := range c.ExtraFiles {
		files["extra_files["+strconv.Itoa(i)+"]"] = &c.ExtraFiles[i]
	}
	for name, f := range files {
		if f.Path == "" {
			return &FieldError{Field: name + ".path", Reason: "empty"}
		}
		digest, ok := strings.CutPrefix(f.Checksum, "blake3:")
		if raw, err := hex.DecodeString(digest); !ok || err != nil || len(raw) != 32 || digest != strings.ToLower(digest) {
			return &FieldError{Field: name + ".checksum", Reason: "not blake3: and 64 lower-case hex digits"}
		}
	}
	return nil
}

func (c *Card) validateRaw() error {
	raws := map[string]json.RawMessage{
		"prompt_context": c.PromptContext, "user_data": c.UserData, "tensor_model_config": c.TensorModelConfig,
		"media_decoder": c.MediaDecoder, "media_fetcher": c.MediaFetcher,
		"router_config": c.RouterConfig, "indexer_identity": c.IndexerIdentity,
		"runtime_config.disaggregated_endpoint": c.RuntimeConfig.DisaggregatedEndpoint,
	}
	for key, raw := range c.RuntimeConfig.RuntimeData {
		raws["runtime_config.runtime_data."+key] = raw
	}
	for name, raw := range raws {
		if raw != nil && !json.Valid(raw) {
			return &FieldError{Field: name, Reason: "not JSON"}
		}
	}
	return nil
}
