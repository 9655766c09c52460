package protocol

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
)

// record is what all records have in common.
type record interface {
	Key() string
	Value() []byte
}

func parseAny(key string, value []byte) (record, error) {
	switch {
	case strings.HasPrefix(key, InstancePrefix):
		r, err := ParseInstance(value)
		return &r, err
	case strings.HasPrefix(key, ModelPrefix):
		r, err := ParseModelRecord(value)
		return &r, err
	case strings.HasPrefix(key, EventSourcePrefix):
		r, err := ParseEventSource(value)
		return &r, err
	default:
		r, err := ParseEventChannel(value)
		return &r, err
	}
}

// recordedRecords returns key and compact value of every record of every
// recorded start.
func recordedRecords(t testing.TB) map[string]map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("testdata", "registration", "*.json"))
	require.NoError(t, err)
	require.Len(t, paths, 7)
	all := map[string]map[string]string{}
	for _, p := range paths {
		b, err := os.ReadFile(p)
		require.NoError(t, err)
		var file struct {
			Etcd map[string]json.RawMessage `json:"etcd"`
		}
		require.NoError(t, json.Unmarshal(b, &file))
		records := map[string]string{}
		for key, raw := range file.Etcd {
			records[key] = compact(t, raw)
		}
		all[filepath.Base(p)] = records
	}
	return all
}

// Every record comes back byte for byte, under its key.
func TestRecordedRecords(t *testing.T) {
	kinds := map[string]int{}
	for file, records := range recordedRecords(t) {
		for key, value := range records {
			r, err := parseAny(key, []byte(value))
			require.NoError(t, err, "%s %s", file, key)
			require.Equal(t, key, r.Key())
			require.Equal(t, value, string(r.Value()), "%s %s", file, key)
			require.Equal(t, r.Value(), r.Value())
			kinds[strings.Split(key, "/")[1]]++
			if m, ok := r.(*ModelRecord); ok {
				require.NoError(t, m.Card.Validate(), file)
			}
		}
	}
	require.Equal(t, map[string]int{"instances": 11, "mdc": 7, "event_channels": 12, "event_sources": 4}, kinds)
}

func ptr[T any](v T) *T { return &v }

func file(name, digest string, size uint64) File {
	return File{Path: "MODEL/" + name, Checksum: "blake3:" + digest, Size: size}
}

// The aggregated worker's records, built by hand as the worker builds them.
func TestRecordsBuiltByHand(t *testing.T) {
	const id = 9041999002035301943
	inst := Instance{
		Namespace: "oracle", Component: "backend", Endpoint: "generate", InstanceID: id,
		Transport:  Transport{Kind: TransportNATS, Address: "oracle_backend.generate-7d7ba22f8fc02e37"},
		DeviceType: "cuda", Codec: CodecMsgpack.String(),
	}
	rc := NewRuntimeConfig()
	rc.ContextLength = ptr(uint32(8192))
	rc.TotalKVBlocks, rc.MaxNumSeqs, rc.MaxNumBatchedTokens = ptr(uint64(1024)), ptr(uint64(2048)), ptr(uint64(8192))
	rc.SetTokenBudget(TokenBudget{CombinedLimit: 8192, RejectPromptOverflow: true})
	model := ModelRecord{
		Namespace: "oracle", Component: "backend", Endpoint: "generate", InstanceID: id,
		Card: Card{
			DisplayName: "tiny", Slug: Slugify("tiny"), SourcePath: "MODEL",
			ModelInfo: &TaggedFile{KindConfig, file("config.json",
				"c6112f2cb677b2becb159f9c75d8797e8a2b6dec5021eea7d0ba9c485bc8b4f4", 300)},
			Tokenizer: &TaggedFile{KindTokenizer, file("tokenizer.json",
				"3267d0120453dc15ecb51b022d0bcfe910e3d56a9c1e7ffca9b631de002522ac", 11922)},
			PromptFormatter: &TaggedFile{KindTokenizerConfig, file("tokenizer_config.json",
				"c4ad9e4d75317d753908e1836efe5acfc285880512e7f408032f6eefd5758684", 282)},
			GenConfig: &TaggedFile{KindGenerationConfig, file("generation_config.json",
				"e4c885eafa9e29e7bd7b3c362a7266dcdeae4439c8dc29942768ff2ec6d94e86", 38)},
			ArchitecturalMaxContextLength: ptr(uint32(8192)), ContextLength: ptr(uint32(8192)),
			KVCacheBlockSize: 32, ModelType: ModelTypeChat + " | " + ModelTypeCompletions, ModelInput: ModelInputTokens,
			WorkerType: WorkerAggregated, RuntimeConfig: rc,
		},
	}
	channel := EventChannel{
		Namespace: "oracle", Component: "backend", Endpoint: "generate",
		Topic: TopicActiveSequences, PublisherID: 2501820961101072,
		Transport: EventTransport{Kind: EventNATS, Address: "namespace.oracle.component.backend.endpoint.generate"},
	}
	want := recordedRecords(t)["aggregated.json"]
	require.Len(t, want, 3)
	for _, r := range []record{&inst, &model, &channel} {
		require.Equal(t, want[r.Key()], string(r.Value()), r.Key())
	}
	require.Nil(t, model.Card.Needs, "Value must not write to the record")
	require.NoError(t, model.Card.Validate())
	budget, ok := model.Card.RuntimeConfig.TokenBudget()
	require.True(t, ok)
	require.Equal(t, uint32(8192), budget.CombinedLimit)
}

// What a card may hold beyond the recorded ones.
func TestFullCard(t *testing.T) {
	sum := strings.Repeat("0f", 32)
	remote := func(name string) File {
		return File{Path: "http://10.0.0.5:9090/v1/metadata/a/b/c/m/_base/" + name + "?a=1&b=<2>", Checksum: "blake3:" + sum}
	}
	rc := NewRuntimeConfig()
	rc.ContextLength = ptr(uint32(0))
	rc.KVEventPublishingEnabled = ptr(true)
	rc.KVEventSourceMode = "framework_v1"
	rc.KVStateEndpoint = &EndpointRef{"a", "b", "c"}
	rc.RuntimeData = map[string]json.RawMessage{"big": json.RawMessage("18446744073709551615")}
	rc.Taints = []string{"gpu=h200"}
	rc.StableRoutingID = "rack-1"
	rc.TopologyDomains = map[string]string{"zone": "a"}
	rc.KVTransferPreferredWeight = ptr(float32(0.5))
	rc.ToolCallParser, rc.ReasoningParser = ptr("hermes"), ptr("qwen3")
	rc.TokenizerFallbackEnabled = ptr(false)
	want := ModelRecord{
		Namespace: "a", Component: "b", Endpoint: "c", InstanceID: 1<<64 - 1, Suffix: "ad_1",
		Card: Card{
			DisplayName: "Some/Model-1.5", Slug: Slugify("Some/Model-1.5"), SourcePath: "Some/Model-1.5",
			ModelInfo:        &TaggedFile{KindConfig, remote("config.json")},
			Tokenizer:        &TaggedFile{KindTikToken, remote("tiktoken.model")},
			PromptFormatter:  &TaggedFile{KindTokenizerConfig, remote("tokenizer_config.json")},
			ChatTemplate:     &ChatTemplate{Kind: KindChatTemplate, Custom: true, File: remote("chat_template.jinja")},
			GenConfig:        &TaggedFile{KindGenerationConfig, remote("generation_config.json")},
			KVCacheBlockSize: 64, ModelType: "Prefill", ModelInput: "Tokens", WorkerType: "prefill",
			Needs: [][]string{{"decode"}, {"aggregated", "encode"}}, Aliases: []string{"m", "model"},
			LoRA: &LoRA{Name: "ad-1", MaxGPULoRACount: ptr(uint32(4))}, UserData: json.RawMessage(`{"id":9041999002035301943}`),
			MediaDecoder: json.RawMessage("null"), MediaFetcher: json.RawMessage("null"),
			RouterConfig:  json.RawMessage(`{"router_mode":"k_v","kv_router_config":{},"load_threshold_config":{}}`),
			RuntimeConfig: rc, ExtraFiles: []File{remote("special_tokens_map.json"), remote("added_tokens.json")},
		},
	}
	require.NoError(t, want.Card.Validate())
	value := want.Value()
	got, err := ParseModelRecord(value)
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(want, got))
	require.Equal(t, value, got.Value())
	require.Equal(t, "v1/mdc/a/b/c/ffffffffffffffff/ad_1", got.Key())
	for _, part := range []string{
		`"instance_id":18446744073709551615`, `"big":18446744073709551615`, `"id":9041999002035301943`,
		`"context_length":0`, `?a=1&b=<2>`, `"chat_template_file":{"hf_chat_template":{"is_custom":true,"file":{`,
		`"model_suffix":"ad_1"`, `"needs":[["decode"],["aggregated","encode"]]`,
	} {
		require.Contains(t, string(value), part)
	}
	require.NotContains(t, string(value), `"size"`)
}

func TestParseModelRecordDefaults(t *testing.T) {
	got, err := ParseModelRecord([]byte(`{"type":"Model","namespace":"n","component":"c","endpoint":"e","instance_id":7,"new":1,
		"card_json":{"display_name":"m","slug":"m","model_info":null,"tokenizer":null,"kv_cache_block_size":16,"migration_limit":0,
		"model_type":"Chat","model_input":"Tokens","chat_template_file":{"hf_chat_template_jinja":{"is_custom":false,"file":{"path":"/x","checksum":"c"}}}}}`))
	require.NoError(t, err)
	rc := got.Card.RuntimeConfig
	require.Equal(t, uint32(1), rc.DataParallelSize)
	require.True(t, rc.EnableLocalIndexer)
	require.True(t, rc.ExcludeToolsWhenToolChoiceNone)
	require.Equal(t, "json_string", rc.ToolCallArgumentsFormat)
	require.Nil(t, rc.KVEventPublishingEnabled)
	require.Empty(t, got.Card.WorkerType)
	require.Equal(t, KindChatTemplate, got.Card.ChatTemplate.Kind)
	_, ok := rc.TokenBudget()
	require.False(t, ok)
}

func TestParseRecordErrors(t *testing.T) {
	instance := func(change string) string {
		return `{"type":"Endpoint","component":"c","endpoint":"e","namespace":"n","instance_id":1,"transport":{"nats_tcp":"s"}` + change + `}`
	}
	_, err := ParseInstance([]byte(instance("")))
	require.NoError(t, err)
	for name, c := range map[string]struct{ key, value string }{
		"empty":               {InstancePrefix, ""},
		"null":                {InstancePrefix, "null"},
		"list":                {InstancePrefix, "[]"},
		"other type":          {InstancePrefix, `{"type":"Model"}`},
		"id is a float":       {InstancePrefix, instance(`,"instance_id":1.0`)},
		"id is too large":     {InstancePrefix, instance(`,"instance_id":18446744073709551616`)},
		"id is negative":      {InstancePrefix, instance(`,"instance_id":-1`)},
		"id is text":          {InstancePrefix, instance(`,"instance_id":"1"`)},
		"no namespace":        {InstancePrefix, instance(`,"namespace":""`)},
		"two transports":      {InstancePrefix, instance(`,"transport":{"tcp":"a"}`)}, // added to the first
		"unknown transport":   {InstancePrefix, `{"type":"Endpoint","component":"c","endpoint":"e","namespace":"n","instance_id":1,"transport":{"x":"s"}}`},
		"no transport":        {InstancePrefix, `{"type":"Endpoint","component":"c","endpoint":"e","namespace":"n","instance_id":1}`},
		"no card":             {ModelPrefix, `{"type":"Model","namespace":"n","component":"c","endpoint":"e","instance_id":1}`},
		"null card":           {ModelPrefix, `{"type":"Model","card_json":null}`},
		"two tokenizers":      {ModelPrefix, `{"type":"Model","card_json":{"display_name":"m","tokenizer":{"a":{},"b":{}}}}`},
		"template is a list":  {ModelPrefix, `{"type":"Model","card_json":{"display_name":"m","chat_template_file":[]}}`},
		"namespace scope":     {EventChannelPrefix, `{"type":"EventChannel","scope":{"kind":"namespace","name":"n"},"transport":{"kind":"Nats","config":{"subject_prefix":"s"}}}`},
		"broker":              {EventChannelPrefix, `{"type":"EventChannel","scope":{"kind":"endpoint"},"transport":{"kind":"ZmqBroker","config":{"xsub_endpoints":[]}}}`},
		"no address":          {EventChannelPrefix, `{"type":"EventChannel","scope":{"kind":"endpoint"},"transport":{"kind":"Zmq","config":{"subject_prefix":"s"}}}`},
		"config is a list":    {EventChannelPrefix, `{"type":"EventChannel","scope":{"kind":"endpoint"},"transport":{"kind":"Nats","config":[]}}`},
		"source of component": {EventSourcePrefix, `{"type":"EventSource","scope":{"kind":"component"}}`},
		"source of nothing":   {EventSourcePrefix, `{"type":"EventSource","scope":{"kind":"endpoint"},"metadata":{"recovery_target":{}}}`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parseAny(c.key, []byte(c.value))
			var re *RecordError
			require.ErrorAs(t, err, &re)
			require.NotEmpty(t, re.Record)
		})
	}
}

func TestEventKeysAreEscaped(t *testing.T) {
	ch := EventChannel{Namespace: "a.b/c", Component: "é", Endpoint: "A-_9", Topic: "t%", PublisherID: 1<<53 - 1,
		Transport: EventTransport{Kind: EventZMQ, Address: "tcp://10.0.0.1:5557"}}
	require.Equal(t, "v1/event_channels/namespace/a%2Eb%2Fc/component/%C3%A9/endpoint/A-_9/topic/t%25/1fffffffffffff", ch.Key())
	require.Contains(t, string(ch.Value()), `"transport":{"kind":"Zmq","config":{"endpoint":"tcp://10.0.0.1:5557"}}`)
	got, err := ParseEventChannel(ch.Value())
	require.NoError(t, err)
	require.Equal(t, ch, got)
}

func TestSlugify(t *testing.T) {
	for in, want := range map[string]string{
		"tiny": "tiny", "Qwen/Qwen3-0.6B": "qwen_qwen3-0_6b", "__a_": "a_", "_/x": "x", "": "", "___": "",
		"é": "", "aé日b": "a__b", "A B\tC": "a_b_c", "-a": "-a", "\xffa": "a", "a\xff\xfeb": "a__b",
		"K":  "k",   // the Kelvin sign is a letter K in lower case
		"İx": "i_x", // lower case of this letter is i and a combining dot
	} {
		require.Equal(t, want, Slugify(in), in)
		require.Equal(t, want, Slugify(want))
	}
}

func TestValidateCard(t *testing.T) {
	good := func() *Card {
		f := File{Path: "/m/f", Checksum: "blake3:" + strings.Repeat("ab", 32)}
		return &Card{
			DisplayName: "m", Slug: "m", ModelInfo: &TaggedFile{KindConfig, f}, Tokenizer: &TaggedFile{KindTokenizer, f},
			KVCacheBlockSize: 32, ModelType: "Chat|Completions", ModelInput: "Tokens", RuntimeConfig: NewRuntimeConfig(),
		}
	}
	require.NoError(t, good().Validate())
	for field, spoil := range map[string]func(*Card){
		"display_name":                      func(c *Card) { c.DisplayName = "" },
		"slug":                              func(c *Card) { c.Slug = "M" },
		"kv_cache_block_size":               func(c *Card) { c.KVCacheBlockSize = 0 },
		"model_input":                       func(c *Card) { c.ModelInput = "tokens" },
		"model_type":                        func(c *Card) { c.ModelType = "Chat | completions" },
		"worker_type":                       func(c *Card) { c.WorkerType = "Decode" },
		"needs":                             func(c *Card) { c.Needs = [][]string{{"prefil"}} },
		"model_info":                        func(c *Card) { c.ModelInfo = nil },
		"tokenizer":                         func(c *Card) { c.Tokenizer = nil },
		"gen_config":                        func(c *Card) { c.GenConfig = &TaggedFile{} },
		"tokenizer.path":                    func(c *Card) { c.Tokenizer.File.Path = "" },
		"model_info.checksum":               func(c *Card) { c.ModelInfo.File.Checksum = strings.Repeat("ab", 32) },
		"chat_template_file.checksum":       func(c *Card) { c.ChatTemplate = &ChatTemplate{File: File{Path: "/x"}} },
		"extra_files[1].checksum":           func(c *Card) { c.ExtraFiles = []File{c.Tokenizer.File, {Path: "x", Checksum: "blake3:AB"}} },
		"runtime_config.data_parallel_size": func(c *Card) { c.RuntimeConfig.DataParallelSize = 0 },
		"router_config":                     func(c *Card) { c.RouterConfig = json.RawMessage("{") },
		"runtime_config.runtime_data.spec_decode": func(c *Card) {
			c.RuntimeConfig.RuntimeData = map[string]json.RawMessage{"spec_decode": json.RawMessage("x")}
		},
	} {
		t.Run(field, func(t *testing.T) {
			c := good()
			spoil(c)
			var fe *FieldError
			require.ErrorAs(t, c.Validate(), &fe)
			require.Equal(t, field, fe.Field)
		})
	}
}
