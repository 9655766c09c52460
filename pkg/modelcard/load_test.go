package modelcard

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFacts(t *testing.T) {
	f := load(t, recordedModel, Options{}).Facts()
	require.Equal(t, Facts{
		Architectures:   []string{"LlamaForCausalLM"},
		ModelType:       "llama",
		EOSTokenIDs:     []uint32{2},
		BOSTokenID:      ptr(uint32(1)),
		MaxPositions:    ptr(uint32(8192)),
		VocabSize:       ptr(uint32(355)),
		HasChatTemplate: true,
	}, f)
}

const minimalConfig = `"architectures":["A"],"model_type":"m"`

// The chain in which frontends look for special tokens.
func TestSpecialTokens(t *testing.T) {
	for _, c := range []struct {
		name, config, generation, tokenizer, special string
		eos                                          []uint32
		bos                                          *uint32
	}{
		{name: "generation config wins", config: `"eos_token_id":7,"bos_token_id":8`, generation: `{"eos_token_id":5,"bos_token_id":6}`,
			tokenizer: `{}`, eos: []uint32{5}, bos: ptr(uint32(6))},
		{name: "list", config: `"eos_token_id":7`, generation: `{"eos_token_id":[128001,128008,128001,"x",-1]}`, tokenizer: `{}`, eos: []uint32{128001, 128008}},
		{name: "config", config: `"eos_token_id":[7,8],"bos_token_id":1`, generation: `{"eos_token_id":null}`, tokenizer: `{}`, eos: []uint32{7, 8}, bos: ptr(uint32(1))},
		{name: "no number", config: `"eos_token_id":7`, generation: `{"eos_token_id":"2"}`, tokenizer: `{}`, eos: []uint32{7}},
		{name: "empty list", config: `"eos_token_id":7`, generation: `{"eos_token_id":[]}`, tokenizer: `{}`, eos: []uint32{7}},
		{name: "text config", config: `"text_config":{"eos_token_id":9,"bos_token_id":3}`, tokenizer: `{}`, eos: []uint32{9}, bos: ptr(uint32(3))},
		{name: "tokenizer's own is added", config: `"eos_token_id":7`, tokenizer: `{"eos_token":"</s>"}`, eos: []uint32{7, 2}},
		{name: "and not twice", config: `"eos_token_id":[7,2]`, tokenizer: `{"eos_token":"</s>"}`, eos: []uint32{7, 2}},
		{name: "tokenizer alone", tokenizer: `{"eos_token":{"content":"</s>"},"bos_token":"<s>"}`, eos: []uint32{2}, bos: ptr(uint32(1))},
		{name: "added tokens decoder before tokenizer.json", tokenizer: `{"eos_token":"</s>","added_tokens_decoder":{"12":{"content":"</s>"},"11":{"content":"</s>"},"x":{"content":"</s>"}}}`, eos: []uint32{11}},
		{name: "special tokens map", tokenizer: `{}`, special: `{"eos_token":{"content":"</s>"},"bos_token":"<s>"}`, eos: []uint32{2}, bos: ptr(uint32(1))},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := map[string]string{nameConfig: "{" + minimalConfig + "}", nameTokenizerConfig: c.tokenizer}
			if c.config != "" {
				files[nameConfig] = "{" + minimalConfig + "," + c.config + "}"
			}
			var remove []string
			if files[nameGenerationConfig] = c.generation; c.generation == "" {
				remove = append(remove, nameGenerationConfig)
			}
			if c.special != "" {
				files[nameSpecialTokensMap] = c.special
			}
			f := load(t, modelDir(t, files, remove...), Options{}).Facts()
			require.Equal(t, c.eos, f.EOSTokenIDs)
			require.Equal(t, c.bos, f.BOSTokenID)
		})
	}
}

func TestMaxPositions(t *testing.T) {
	for _, c := range []struct {
		config, tokenizer string
		want              *uint32
	}{
		{`"max_position_embeddings":4096`, `{"model_max_length":7}`, ptr(uint32(4096))},
		{`"text_config":{"max_position_embeddings":131072}`, `{}`, ptr(uint32(131072))},
		{`"max_position_embeddings":null,"text_config":{"max_position_embeddings":5}`, `{}`, ptr(uint32(5))},
		{`"max_position_embeddings":0`, `{"model_max_length":7}`, nil},
		{`"x":1`, `{"model_max_length":7}`, ptr(uint32(7))},
		{`"x":1`, `{"model_max_length":1000000000000000019884624838656}`, nil}, // Python's "none"
		{`"x":1`, `{}`, nil},
	} {
		dir := modelDir(t, map[string]string{nameConfig: "{" + minimalConfig + "," + c.config + "}", nameTokenizerConfig: c.tokenizer})
		m := load(t, dir, Options{})
		require.Equal(t, c.want, m.Facts().MaxPositions, c.config)
		card, err := m.Card(Spec{Name: "m", Endpoints: EndpointCompletions}, nil)
		require.NoError(t, err)
		require.Equal(t, c.want, card.ArchitecturalMaxContextLength)
		require.NotNil(t, card.ContextLength)
	}
	_, err := Load(modelDir(t, map[string]string{nameConfig: "{" + minimalConfig + `,"max_position_embeddings":"8k"}`}), Options{})
	require.ErrorIs(t, err, ErrBadFile)
	require.ErrorContains(t, err, "max_position_embeddings")
}

// A folder that cannot be served says which file, what is wrong with it, and
// what would come of it.
func TestUnusableFolders(t *testing.T) {
	for _, c := range []struct {
		name    string
		changes map[string]string
		remove  []string
		kind    error
		want    string
	}{
		{"no config", nil, []string{nameConfig}, ErrNoConfig, "config.json: is missing (a frontend would refuse"},
		{"broken config", map[string]string{nameConfig: `{"architectures": [`}, nil, ErrBadFile, "config.json: cannot be understood: not valid JSON"},
		{"empty config", map[string]string{nameConfig: ""}, nil, ErrBadFile, "config.json: cannot be understood"},
		{"config without architectures", map[string]string{nameConfig: `{"model_type":"m"}`}, nil, ErrBadFile, `config.json: has no list "architectures"`},
		{"config without type", map[string]string{nameConfig: `{"architectures":[]}`}, nil, ErrBadFile, `config.json: has no "model_type"`},
		{"no tokenizer", nil, []string{nameTokenizer}, ErrNoTokenizer, "tokenizer.json: is missing, and there is neither tiktoken.model nor a file *.tiktoken (a frontend would have no tokenizer"},
		{"cut tokenizer", map[string]string{nameTokenizer: `{"added_tokens":[`}, nil, ErrBadFile, "tokenizer.json: is not valid JSON"},
		{"odd tokenizer", map[string]string{nameTokenizer: `{"added_tokens":7}`}, nil, ErrBadFile, "tokenizer.json: cannot be understood"},
		{"two tiktoken files", map[string]string{"a.tiktoken": "x", "b.tiktoken": "x"}, []string{nameTokenizer}, ErrAmbiguousTokenizer, "a.tiktoken, b.tiktoken: several tokenizers"},
		{"broken generation config", map[string]string{nameGenerationConfig: `{`}, nil, ErrBadFile, "generation_config.json: is not valid JSON"},
		{"broken tokenizer config", map[string]string{nameTokenizerConfig: `[]`}, nil, ErrBadFile, "tokenizer_config.json: is not valid JSON"},
		{"no EOS", map[string]string{nameConfig: "{" + minimalConfig + "}", nameTokenizerConfig: `{"eos_token":"<unheard of>"}`}, []string{nameGenerationConfig}, ErrNoEOS,
			"names a usable end-of-sequence token (a frontend would fail"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := modelDir(t, c.changes, c.remove...)
			m, err := Load(dir, Options{})
			require.Nil(t, m)
			require.ErrorIs(t, err, c.kind)
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "model folder "+dir+": ")
			var e *Error
			require.ErrorAs(t, err, &e)
		})
	}
}

func TestMissingFolder(t *testing.T) {
	_, err := Load(filepath.Join(t.TempDir(), "nope"), Options{})
	require.ErrorIs(t, err, ErrNoFolder)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "does not exist")
	_, err = Load("testdata/README.md", Options{})
	require.ErrorIs(t, err, ErrNoFolder)
}

func TestTikToken(t *testing.T) {
	for _, name := range []string{nameTikToken, "qwen.tiktoken"} {
		dir := modelDir(t, map[string]string{name: "IQ== 0\n", nameTokenizerConfig: `{"chat_template":"x"}`}, nameTokenizer)
		card, err := load(t, dir, Options{}).Card(Spec{Name: "m"}, nil)
		require.NoError(t, err)
		require.Equal(t, "tik_token_model", card.Tokenizer.Kind)
		require.Equal(t, filepath.Join(dir, name), card.Tokenizer.File.Path)
		require.Empty(t, card.ExtraFiles)
	}
}

// Recorded: which files a Dynamo 1.6.1 worker ships beside those with slots.
// We leave out weights in upper case as well, and a few more formats of them.
func TestExtraFiles(t *testing.T) {
	side := []string{"LICENSE", "LICENSE.txt", "README", "USE_POLICY.md", "a b.txt", "added_tokens.json", "image.png", "merges.txt", "model.py",
		"model.safetensors.index.json", "preprocessor_config.json", "readme.md", "special_tokens_map.json", "tokenizer.model", "vocab.txt", "x.ckpt.index"}
	left := []string{"README.md", ".gitattributes", ".gitignore", ".hidden",
		"model.safetensors", "pytorch_model.bin", "x.gguf", "x.onnx", "x.tflite", "x.h5", "x.pt", "x.pth", "x.msgpack",
		"BIG.SAFETENSORS", "rank0.engine", "model.ckpt", "x.npz"}
	files := map[string]string{nameTemplate: "{{ messages }}", nameTemplateJSON: `{"chat_template":""}`}
	for _, name := range append(append([]string{}, side...), left...) {
		files[name] = "{}"
	}
	dir := modelDir(t, files)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "sub"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "sub", "deep.json"), []byte("{}"), 0o600))
	require.NoError(t, os.Symlink(filepath.Join(dir, "sub", "deep.json"), filepath.Join(dir, "linked.json")))
	require.NoError(t, os.Symlink(filepath.Join(dir, "nowhere"), filepath.Join(dir, "dangling.json")))
	require.NoError(t, syscall.Mkfifo(filepath.Join(dir, "pipe.json"), 0o600))

	m := load(t, dir, Options{})
	var got []string
	seen := make(map[string]bool)
	for _, f := range m.Files() {
		require.False(t, seen[f.Name], "two files named %s", f.Name)
		seen[f.Name] = true
		if f.Extra {
			got = append(got, f.Name)
		}
	}
	// chat_template.json has no slot when chat_template.jinja takes it.
	require.ElementsMatch(t, append(side, "linked.json", nameTemplateJSON), got)
	require.Empty(t, m.Skipped())
	require.True(t, seen[nameTemplate])
}

func TestBounds(t *testing.T) {
	dir := modelDir(t, map[string]string{"vocab.txt": strings.Repeat("v", 500), "merges.txt": strings.Repeat("m", 500), "big.txt": strings.Repeat("b", 2000)})
	slots := 0
	for _, f := range load(t, dir, Options{LocalOnly: true}).Files() {
		slots += int(f.Size)
	}

	m := load(t, dir, Options{MaxExtra: 1000, MaxTotal: int64(slots) + 600})
	require.Equal(t, []Skipped{
		{"big.txt", "2000 bytes, at most 600 would be taken"},
		{"vocab.txt", "500 bytes, at most 100 would be taken"},
	}, m.Skipped())
	card, err := m.Card(Spec{Name: "m"}, nil)
	require.NoError(t, err)
	require.Len(t, card.ExtraFiles, 1)

	_, err = Load(dir, Options{MaxFile: 300}) // the tokenizer has more
	require.ErrorIs(t, err, ErrTooLarge)
	require.ErrorContains(t, err, "tokenizer.json: is too large to be kept in memory: 11922 bytes, at most 300 would be taken")
	_, err = Load(dir, Options{MaxTotal: 5000})
	require.ErrorIs(t, err, ErrTooLarge)
	m = load(t, dir, Options{MaxFile: 11922, MaxTotal: int64(slots)})
	require.Len(t, m.Skipped(), 3, "no byte is left for side files")
}

func TestLocalOnlyKeepsNoBytes(t *testing.T) {
	dir := modelDir(t, map[string]string{"vocab.txt": "v"})
	m := load(t, dir, Options{LocalOnly: true})
	for _, f := range m.slots() {
		require.Nil(t, f.data)
		require.Positive(t, f.size)
	}
	card, err := m.Card(Spec{Name: "m"}, nil)
	require.NoError(t, err)
	require.Empty(t, card.ExtraFiles, "a frontend on this machine finds them itself")
	_, err = m.Card(Spec{Name: "m"}, &Hosting{})
	require.ErrorAs(t, err, ptr(&SpecError{}))
}

func TestCustomTemplate(t *testing.T) {
	dir := modelDir(t, map[string]string{nameTemplate: "{{ own }}", nameTokenizerConfig: `{"eos_token":"</s>"}`})
	elsewhere := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(elsewhere, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}

	m := load(t, dir, Options{CustomTemplate: write("mine.jinja", "{{ mine }}")})
	card, err := m.Card(Spec{Name: "m"}, nil)
	require.NoError(t, err)
	require.Equal(t, "hf_chat_template", card.ChatTemplate.Kind)
	require.True(t, card.ChatTemplate.Custom)
	require.Equal(t, filepath.Join(elsewhere, "mine.jinja"), card.ChatTemplate.File.Path)
	require.Len(t, card.ExtraFiles, 1, "the model's own template is a side file now")

	// A template of the same name replaces the model's own.
	m = load(t, dir, Options{CustomTemplate: write(nameTemplate, "{{ mine }}")})
	card, err = m.Card(Spec{Name: "m"}, nil)
	require.NoError(t, err)
	require.Empty(t, card.ExtraFiles)

	m = load(t, dir, Options{CustomTemplate: write("mine.JSON", `{"chat_template":"x"}`)})
	card, err = m.Card(Spec{Name: "m"}, nil)
	require.NoError(t, err)
	require.Equal(t, "hf_chat_template_json", card.ChatTemplate.Kind)

	_, err = Load(dir, Options{CustomTemplate: write(nameConfig, "{{ mine }}")})
	require.ErrorIs(t, err, ErrDuplicateName)
	_, err = Load(dir, Options{CustomTemplate: filepath.Join(elsewhere, "missing")})
	require.ErrorIs(t, err, ErrBadFile)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Load(dir, Options{CustomTemplate: elsewhere})
	require.ErrorContains(t, err, "no regular file")
}

func TestOwnTemplateJSON(t *testing.T) {
	dir := modelDir(t, map[string]string{nameTemplateJSON: `{"chat_template":"x"}`})
	card, err := load(t, dir, Options{}).Card(Spec{Name: "m"}, nil)
	require.NoError(t, err)
	require.Equal(t, "hf_chat_template_json", card.ChatTemplate.Kind)
	require.False(t, card.ChatTemplate.Custom)
}

// The checksum always is that of the bytes that are served, whatever happens
// to the file afterwards.
func TestEditsAfterLoading(t *testing.T) {
	dir := modelDir(t, nil)
	m := load(t, dir, Options{})
	before := bytes.Clone(m.config.data)
	require.NoError(t, os.WriteFile(filepath.Join(dir, nameConfig), []byte("edited"), 0o600))
	require.NoError(t, os.Remove(filepath.Join(dir, nameTokenizer)))
	require.Equal(t, before, m.config.data)
	require.Equal(t, "blake3:c6112f2cb677b2becb159f9c75d8797e8a2b6dec5021eea7d0ba9c485bc8b4f4", m.config.checksum)
}

func TestFactsAreCopies(t *testing.T) {
	m := load(t, recordedModel, Options{})
	f := m.Facts()
	f.EOSTokenIDs[0], f.Architectures[0] = 99, "x"
	require.Equal(t, []uint32{2}, m.Facts().EOSTokenIDs)
}
