package protocol

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// requireDecodeError checks that a body was refused with one of our errors, at a
// place inside the body.
func requireDecodeError(t *testing.T, err error, body []byte) {
	t.Helper()
	de, ok := errors.AsType[*DecodeError](err)
	if !ok {
		t.Fatalf("untyped error %T: %v", err, err)
	}
	if de.Offset < 0 || de.Offset > len(body) || de.Reason == "" {
		t.Fatalf("offset %d in %d bytes, reason %q", de.Offset, len(body), de.Reason)
	}
}

// same is equality of trees in which NaN equals NaN.
func same(a, b any) bool {
	switch a := a.(type) {
	case float64:
		b, ok := b.(float64)
		return ok && (math.Float64bits(a) == math.Float64bits(b) || a != a && b != b)
	case []any:
		b, ok := b.([]any)
		if !ok || len(a) != len(b) {
			return false
		}
		for i := range a {
			if !same(a[i], b[i]) {
				return false
			}
		}
		return true
	case Map:
		b, ok := b.(Map)
		if !ok || len(a) != len(b) {
			return false
		}
		for k := range a {
			if _, ok := b[k]; !ok || !same(a[k], b[k]) {
				return false
			}
		}
		return true
	default:
		return reflect.DeepEqual(a, b)
	}
}

func seedMsgpack(f *testing.F) {
	for _, body := range requestBodies(f) {
		f.Add(body)
	}
	for _, fr := range frames(f, "response-00.bin") {
		if len(fr.Data) > 0 {
			f.Add(fr.Data)
		}
	}
	paths, err := filepath.Glob(filepath.Join("testdata", "events", "*.bin"))
	if err != nil || len(paths) == 0 {
		f.Fatal("no events", err)
	}
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	for _, s := range []string{"\xdd\xff\xff\xff\xff", "\xdf\x7f\xff\xff\xff\x01", strings.Repeat("\x91", 70), "\x81\xa9token_ids\xc4\x04\x01\x00\x00\x00", "\xd4\x01\x00"} {
		f.Add([]byte(s))
	}
}

// FuzzDecodeMsgpack: what is taken survives another round, and so does what our
// own encoder makes of it.
func FuzzDecodeMsgpack(f *testing.F) {
	seedMsgpack(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := DecodeValue(CodecMsgpack, b)
		if err != nil {
			requireDecodeError(t, err, b)
			return
		}
		out := AppendValue(nil, CodecMsgpack, v)
		back, err := DecodeValue(CodecMsgpack, out)
		if err != nil || !same(v, back) {
			t.Fatalf("%#v came back as %#v, %v", v, back, err)
		}
		if text := AppendValue(nil, CodecJSON, v); !json.Valid(text) {
			t.Fatalf("not JSON: %s", text)
		}
	})
}

// plainer turns what the standard library decodes into our kind of tree, or tells
// that we may refuse it.
func plainer(v any) (any, bool) {
	switch v := v.(type) {
	case json.Number:
		if !strings.ContainsAny(string(v), ".eE") {
			if i, err := strconv.ParseInt(string(v), 10, 64); err == nil {
				return i, true
			}
			u, err := strconv.ParseUint(string(v), 10, 64)
			return u, err == nil
		}
		f, err := strconv.ParseFloat(string(v), 64)
		return f, err == nil
	case []any:
		for i := range v {
			var ok bool
			if v[i], ok = plainer(v[i]); !ok {
				return nil, false
			}
		}
	case map[string]any:
		for k := range v {
			var ok bool
			if v[k], ok = plainer(v[k]); !ok {
				return nil, false
			}
		}
	}
	return v, true
}

// FuzzDecodeJSON compares with the standard library: what we take is what it
// reads, and what only we refuse we refuse for one of our stricter rules.
func FuzzDecodeJSON(f *testing.F) {
	for _, name := range []string{"core/plain", "core/sampling_all", "core/guided_json_dict", "core/temperature_negative"} {
		c := readCase(f, name)
		f.Add([]byte(c.Request))
		for _, fr := range c.Frames {
			f.Add([]byte(fr.Body))
		}
	}
	for _, s := range []string{`{"a":1,"a":2}`, `"\ud83d\ude00\n"`, `[18446744073709551615,-1.5e-3]`, strings.Repeat("[", 70), `"\ud800"`, " null ", `{"a":{}}`} {
		f.Add([]byte(s))
	}
	stricter := map[string]bool{reasonDuplicate: true, reasonDepth: true, reasonValues: true, reasonUTF8: true,
		reasonSurrogate: true, reasonInteger: true, reasonFloat: true}
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := DecodeValue(CodecJSON, b)
		if err != nil {
			requireDecodeError(t, err, b)
			if de, _ := errors.AsType[*DecodeError](err); json.Valid(b) && !stricter[de.Reason] {
				t.Fatalf("refused valid JSON: %v", err)
			}
			return
		}
		dec := json.NewDecoder(bytes.NewReader(b))
		dec.UseNumber()
		var std any
		if err := dec.Decode(&std); err != nil || !json.Valid(b) {
			t.Fatalf("took what is not JSON: %v", err)
		}
		if want, ok := plainer(std); !ok || !same(want, v) {
			t.Fatalf("read %#v, standard library %#v", v, want)
		}
		for _, c := range bothCodecs {
			back, err := DecodeValue(c, AppendValue(nil, c, v))
			if err != nil || !same(v, back) {
				t.Fatalf("%#v came back from %s as %#v, %v", v, c, back, err)
			}
		}
	})
}

// FuzzParseRequest compares with decoding the body as a value: both take the same
// bodies, except for what is wrong with the token ids alone.
func FuzzParseRequest(f *testing.F) {
	for _, body := range requestBodies(f) {
		f.Add(true, body)
	}
	f.Add(true, []byte("\x81\xa9token_ids\xc4\x04\x01\x00\x00\x00"))
	f.Add(true, []byte("\x82\xa9token_ids\xc0\xa1a\x91\x01"))
	for _, name := range []string{"core/plain", "core/sampling_all", "core/token_ids_null"} {
		f.Add(false, []byte(readCase(f, name).Request))
	}
	f.Add(false, []byte(`{"token_ids":[1,-0,2147483647],"a":[]}`))
	f.Fuzz(func(t *testing.T, msgpack bool, b []byte) {
		c := CodecJSON
		if msgpack {
			c = CodecMsgpack
		}
		v, valueErr := DecodeValue(c, b)
		req, err := ParseRequest(c, b)
		// A key may be written with escapes, which the quick look at a length does not read.
		if n := PromptLength(c, b); err == nil && n != len(req.TokenIDs) && (msgpack || !bytes.ContainsRune(b, '\\')) {
			t.Fatalf("length %d of %d ids", n, len(req.TokenIDs))
		}
		var field *FieldError
		switch {
		case errors.As(err, &field):
			// The first fault is reported, whatever follows it.
			if !strings.HasPrefix(field.Field, "token_ids") {
				t.Fatalf("fault of %s", field.Field)
			}
			return
		case err != nil && valueErr == nil:
			if _, isMap := v.(Map); isMap {
				t.Fatalf("refused a good map: %v", err)
			}
			if _, ok := errors.AsType[*NotMapError](err); !ok {
				t.Fatalf("%T for what is no map", err)
			}
			return
		case err != nil:
			requireDecodeError(t, err, b)
			return
		case valueErr != nil:
			if de, _ := errors.AsType[*DecodeError](valueErr); de.Reason == reasonValues || de.Reason == reasonInteger {
				return // token ids have rules of their own
			}
			t.Fatalf("took what is no value: %v", valueErr)
		}
		for i, id := range req.TokenIDs {
			if id < 0 {
				t.Fatalf("token %d is %d", i, id)
			}
		}
		m := v.(Map)
		ids, there := m["token_ids"]
		if there != (req.TokensState != TokensAbsent) || len(m) != len(req.Fields)+btoi(there) {
			t.Fatalf("%d fields of %d", len(req.Fields), len(m))
		}
		if list, ok := ids.([]any); ok && len(list) != len(req.TokenIDs) {
			t.Fatalf("%d ids of %d", len(req.TokenIDs), len(list))
		}
		back, err := ParseRequest(c, req.Append(nil, c))
		if err != nil || !same(any(req.Fields), any(back.Fields)) || !reflect.DeepEqual(req.TokenIDs, back.TokenIDs) ||
			req.TokensState != back.TokensState || req.Packed != back.Packed {
			t.Fatalf("%+v came back as %+v, %v", req, back, err)
		}
	})
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// FuzzParseItem: an item that was read can be written and read again.
func FuzzParseItem(f *testing.F) {
	for _, name := range []string{"response-00.bin", "response-04.bin"} {
		for _, fr := range frames(f, name) {
			if len(fr.Data) > 0 {
				f.Add(true, fr.Data)
			}
		}
	}
	for _, name := range []string{"core/plain", "core/logprobs_5", "core/temperature_negative", "core/engine_request_error_first", "prefill/logprobs_2", "core/stop_hidden"} {
		for _, body := range readCase(f, name).bodies(f) {
			f.Add(false, []byte(body))
		}
	}
	f.Fuzz(func(t *testing.T, msgpack bool, b []byte) {
		c := CodecJSON
		if msgpack {
			c = CodecMsgpack
		}
		item, err := ParseItem(c, b)
		if err != nil {
			if _, ok := errors.AsType[*FieldError](err); !ok {
				requireDecodeError(t, err, b)
			}
			return
		}
		if (item.Err != nil) != (item.Event == "error") {
			t.Fatal("an error is what has the event error")
		}
		out := appendItem(nil, c, &item)
		back, err := ParseItem(c, out)
		if err != nil {
			// Nesting that only just passed may be one deeper the way we write it.
			if de, ok := errors.AsType[*DecodeError](err); ok && de.Reason == reasonDepth {
				return
			}
			t.Fatalf("%s: %v", out, err)
		}
		again := appendItem(nil, c, &back)
		if !bytes.Equal(out, again) {
			t.Fatalf("%q came back as %q", out, again)
		}
	})
}

func FuzzParseError(f *testing.F) {
	for _, c := range constructors {
		f.Add(c.make.AppendJSON(nil))
	}
	f.Add([]byte(`{"error_type":{"Backend":"x"},"class":"Internal","caused_by":{"caused_by":{}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := ParseErrorJSON(b)
		if err != nil {
			return
		}
		for cause := e; cause != nil; cause = cause.Cause {
			if class, ok := ClassOf(cause.Reason); !ok || class != cause.Class {
				t.Fatalf("%s under %s", cause.Reason, cause.Class)
			}
		}
		migratable := e.Migratable()
		out := e.AppendJSON(nil)
		back, err := ParseErrorJSON(out)
		if err != nil || back.Migratable() != migratable || back.Reason != e.Reason {
			t.Fatalf("%s: %v", out, err)
		}
		if len(back.Message) > MaxMessageLen {
			t.Fatalf("message of %d bytes", len(back.Message))
		}
	})
}

// FuzzParseRecords: a record that was read has one form and keeps it.
func FuzzParseRecords(f *testing.F) {
	for _, records := range recordedRecords(f) {
		for key, value := range records {
			f.Add(key, []byte(value))
		}
	}
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		r, err := parseAny(key, value)
		if err != nil {
			if _, ok := errors.AsType[*RecordError](err); !ok {
				t.Fatalf("untyped error %T: %v", err, err)
			}
			return
		}
		out := r.Value()
		again, err := parseAny(key, out)
		if err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		if !bytes.Equal(out, again.Value()) || r.Key() != again.Key() {
			t.Fatalf("%s came back as %s", out, again.Value())
		}
	})
}

func FuzzSlugify(f *testing.F) {
	for _, s := range []string{"tiny", "Qwen/Qwen3-0.6B", "__a", "İ", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		slug := Slugify(s)
		if strings.Trim(slug, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" || strings.HasPrefix(slug, "_") {
			t.Fatalf("%q became %q", s, slug)
		}
		if Slugify(slug) != slug {
			t.Fatalf("%q is not stable", slug)
		}
		if utf8.RuneCountInString(slug) > 2*utf8.RuneCountInString(s) {
			t.Fatalf("%q grew to %q", s, slug)
		}
	})
}
