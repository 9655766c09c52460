package app

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"dynworker/internal/caller"
	"dynworker/pkg/affinity"
	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"

	"github.com/stretchr/testify/require"
)

func TestServesOverBothPlanesAndCodecs(t *testing.T) {
	w := newWorld(t)
	for _, plane := range []string{"nats", "tcp"} {
		r := w.start("request_plane.kind=" + plane)
		i, c := r.instance(), w.caller()
		for _, codec := range []protocol.Codec{protocol.CodecJSON, protocol.CodecMsgpack} {
			s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: codec, Request: ask(20, nil)})
			require.NoError(t, err)
			a := read(s)
			require.NoError(t, a.err)
			require.Equal(t, expected(20), a.tokens, "%s %s", plane, codec)
			require.Equal(t, protocol.FinishLength, a.finish)
		}
		require.NoError(t, r.stop())
		require.Empty(t, w.records(), "nothing of a worker that ended may be left")
	}
}

func TestMergingCanBeTurnedOff(t *testing.T) {
	w := newWorld(t)
	r := w.start("response_plane.merge_tokens=false")
	s, err := w.caller().Do(timeout(t), caller.Call{Transport: r.instance().Transport, Codec: protocol.CodecMsgpack, Request: ask(500, nil)})
	require.NoError(t, err)
	a := read(s)
	require.NoError(t, a.err)
	require.Equal(t, expected(500), a.tokens)
	require.Equal(t, 500, a.chunks, "a frame for each step of the engine")
	require.NoError(t, r.stop())
}

func TestTheRecordsAreWhatAFrontendExpects(t *testing.T) {
	w := newWorld(t)
	r := w.start("engine.sim.attention_dp_size=4", "namespace=prod", "namespace_suffix=blue")
	records := w.records()
	require.Len(t, records, 2)
	i := r.instance()
	require.Equal(t, "prod-blue", i.Namespace)
	require.Equal(t, "msgpack", i.Codec)
	require.Equal(t, protocol.Transport{Kind: protocol.TransportNATS, Address: wire.Subject(i.InstanceID, "prod-blue", "backend", "generate")}, i.Transport)
	model, err := protocol.ParseModelRecord([]byte(records[strings.Replace(i.Key(), protocol.InstancePrefix, protocol.ModelPrefix, 1)]))
	require.NoError(t, err)
	require.Equal(t, i.InstanceID, model.InstanceID)
	require.Equal(t, "tiny", model.Card.DisplayName)
	require.Equal(t, uint32(4), model.Card.RuntimeConfig.DataParallelSize)
	require.False(t, model.Card.RuntimeConfig.EnableLocalIndexer, "no KV query is answered yet")

	url := model.Card.Tokenizer.File.Path
	require.True(t, strings.HasPrefix(url, "http://") && strings.HasSuffix(url, "/tokenizer.json"), url)
	// The advertised address need not be loopback; the path is what the server has to know.
	_, path, _ := strings.Cut(strings.TrimPrefix(url, "http://"), "/")
	status, body := get(t, r, "/"+path)
	require.Equal(t, http.StatusOK, status)
	require.Len(t, body, int(model.Card.Tokenizer.File.Size))
	_, metrics := get(t, r, "/metrics")
	require.Contains(t, metrics, `dynworker_model_file_gets_total{file="tokenizer.json"} 1`)
}

// get asks the system server.
func get(t *testing.T, r *running, path string) (int, string) { return do(t, r, http.MethodGet, path) }

func do(t *testing.T, r *running, method, path string) (int, string) {
	req, err := http.NewRequestWithContext(timeout(t), method, "http://"+r.serving.SystemAddress+path, nil)
	require.NoError(t, err)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(body)
}

// TestBadInputGetsAClearAnswer sends what no frontend sends. Each gets an answer, and the worker serves the next request.
func TestBadInputGetsAClearAnswer(t *testing.T) {
	w := newWorld(t)
	for _, plane := range []string{"nats", "tcp"} {
		r := w.start("request_plane.kind=" + plane)
		i, c := r.instance(), w.caller()
		do := func(call caller.Call) (answer, error) {
			call.Transport = i.Transport
			if call.Request == nil && call.Body == nil {
				call.Request = ask(3, nil)
			}
			s, err := c.Do(timeout(t), call)
			if err != nil {
				return answer{}, err
			}
			return read(s), nil
		}
		// What can be called back is a 400 with the reason.
		for name, bad := range map[string]struct {
			call   caller.Call
			public string
		}{
			"a body that is no map":     {caller.Call{Codec: protocol.CodecMsgpack, Body: []byte{0x91, 0x01}}, "request body is a list, not a map"},
			"a body that is cut":        {caller.Call{Codec: protocol.CodecMsgpack, Mangle: func(m []byte) []byte { return m[:len(m)-5] }}, "request body: "},
			"the wrong codec":           {caller.Call{Codec: protocol.CodecMsgpack, Body: []byte(`{"token_ids":[1,2,3]}`)}, "request body: msgpack body: "},
			"an unknown codec":          {caller.Call{Codec: protocol.CodecJSON, Edit: func(h *wire.RequestControl) { h.PayloadCodec = "bson" }}, `unknown codec "bson"`},
			"an empty body":             {caller.Call{Codec: protocol.CodecMsgpack, Body: []byte{}}, "request body: "},
			"a token that is no number": {caller.Call{Codec: protocol.CodecJSON, Body: []byte(`{"token_ids":["a"]}`)}, "request body: token_ids[0]: "},
			"a huge claimed length":     {caller.Call{Codec: protocol.CodecMsgpack, Body: []byte{0x81, 0xa9, 't', 'o', 'k', 'e', 'n', '_', 'i', 'd', 's', 0xdd, 0xff, 0xff, 0xff, 0xff}}, "request body: msgpack body: length is beyond the end of the body"},
			"an id beyond the vocabulary": {caller.Call{Codec: protocol.CodecMsgpack, Request: &protocol.Request{TokenIDs: []int32{400}, TokensState: protocol.TokensList, Fields: protocol.Map{}}},
				"token_ids[0] is 400, outside the vocabulary of 355 tokens"},
		} {
			a, err := do(bad.call)
			require.NoError(t, err, "%s: %s", plane, name)
			var refused *protocol.Error
			require.ErrorAs(t, a.err, &refused, "%s: %s", plane, name)
			require.Equal(t, protocol.ClassInvalidRequest, refused.Class, "%s: %s", plane, name)
			require.Contains(t, refused.Public.Message, bad.public, "%s: %s", plane, name)
		}
		// What cannot be called back is refused in the reply.
		for name, mangle := range map[string]func([]byte) []byte{
			"a cut frame head":          func(m []byte) []byte { return m[:10] },
			"a header that is no JSON":  func([]byte) []byte { return wire.AppendFrame(nil, []byte("hello"), []byte("x")) },
			"no header":                 func([]byte) []byte { return wire.AppendFrame(nil, nil, []byte("x")) },
			"a header without a reader": func([]byte) []byte { return wire.AppendFrame(nil, []byte(`{"id":"a"}`), []byte("x")) },
		} {
			_, err := do(caller.Call{Mangle: mangle})
			require.ErrorIs(t, err, caller.ErrUnavailable, "%s: %s", plane, name)
		}
		// An answer address where nobody answers is given up and counted.
		_, err := do(caller.Call{CallHomeTimeout: time.Nanosecond, Edit: func(h *wire.RequestControl) { h.Connection.Address = "127.0.0.1:1" }})
		require.ErrorIs(t, err, caller.ErrNoCallHome)
		require.Eventually(t, func() bool {
			_, m := get(t, r, "/metrics")
			return strings.Contains(m, `error_type="response_stream"`)
		}, patience, 10*time.Millisecond)

		a, err := do(caller.Call{Codec: protocol.CodecMsgpack})
		require.NoError(t, err)
		require.Equal(t, expected(3), a.tokens, "the next request is served")
		require.NoError(t, r.stop())
	}
}

func TestErrorsOfTheEngine(t *testing.T) {
	w := newWorld(t)
	r := w.start()
	i, c := r.instance(), w.caller()
	for _, name := range []string{"request-error:3", "value-error", "no-outputs:2", "no-finish:2", "timeout:2"} {
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt("sim:"+name))})
		require.NoError(t, err)
		a := read(s)
		require.NoError(t, a.err, name)
		require.Equal(t, protocol.FinishError, a.finish, name)
		require.NotEmpty(t, a.text, name)
	}
	require.NoError(t, r.stop())
}

func TestAClientThatLeavesIsOneCancel(t *testing.T) {
	w := newWorld(t)
	r := w.start("engine.sim.token_delay=5ms")
	i, c := r.instance(), w.caller()
	for name, leave := range map[string]func(*caller.Stream){
		"stop": func(s *caller.Stream) { require.NoError(t, s.Stop()) }, "kill": func(s *caller.Stream) { require.NoError(t, s.Kill()) },
		"reset": func(s *caller.Stream) { s.Reset() }, "garbage": func(s *caller.Stream) {
			require.NoError(t, s.SendRaw([]byte("not a frame, but long enough to be one")))
		},
	} {
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(8000, nil), ID: name})
		require.NoError(t, err)
		for range 3 {
			_, err = s.Next()
			require.NoError(t, err, name)
		}
		leave(s)
		require.Eventually(t, func() bool { return count(t, r, "finish", name) == 1 }, patience, 5*time.Millisecond, "%s: the engine stops", name)
		require.Equal(t, 1, count(t, r, "cancel", name), name)
		require.NoError(t, s.Close())
	}
	// The end of the frontend's half is no cancellation.
	s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, nil), ID: "half"})
	require.NoError(t, err)
	require.NoError(t, s.HalfClose())
	require.Equal(t, expected(10), read(s).tokens)
	require.Zero(t, count(t, r, "cancel", "half"))
	require.NoError(t, r.stop())
}

// count counts lines of the engine's own record. Cancels and finishes carry the engine's id, which the generate line joins with the request's.
func count(t *testing.T, r *running, event, request string) int {
	data, err := os.ReadFile(r.calls)
	require.NoError(t, err)
	n := 0
	var id float64
	for line := range strings.SplitSeq(strings.TrimSpace(string(data)), "\n") {
		var l map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &l))
		if l["request_id"] == request && l["event"] == "generate" {
			id = l["id"].(float64)
		}
		if l["event"] == event && (l["request_id"] == request || id != 0 && l["id"] == id) {
			n++
		}
	}
	return n
}

func TestADrainFinishesWhatRuns(t *testing.T) {
	w := newWorld(t)
	r := w.start("engine.sim.token_delay=20ms")
	i, c := r.instance(), w.caller()
	var streams []*caller.Stream
	for range 10 {
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(100, nil)})
		require.NoError(t, err)
		_, err = s.Next()
		require.NoError(t, err)
		streams = append(streams, s)
	}
	r.cancel()
	require.Eventually(t, func() bool { return len(w.records()) == 1 }, patience, 5*time.Millisecond, "the instance goes first, the card stays")
	for _, s := range streams {
		a := read(s)
		require.NoError(t, a.err)
		require.Len(t, a.tokens, 99)
	}
	require.NoError(t, r.wait())
	require.Empty(t, w.records())
}

func TestADrainWithoutBudgetHandsRequestsOn(t *testing.T) {
	w := newWorld(t)
	r := w.start("engine.sim.token_delay=20ms", "drain.budget=0s", "admission.max_requests=2", "admission.queue=3")
	i, c := r.instance(), w.caller()
	var streams []*caller.Stream
	for range 5 {
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(8000, nil)})
		require.NoError(t, err)
		require.NoError(t, s.Prologue(), "also what waits has been accepted")
		streams = append(streams, s)
	}
	_, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(1, nil)})
	require.ErrorIs(t, err, caller.ErrOverloaded)
	r.cancel()
	for _, s := range streams {
		a := read(s)
		var cut *protocol.Error
		require.ErrorAs(t, a.err, &cut)
		require.Equal(t, protocol.ReasonBackendEngineShutdown, cut.Reason)
		require.Equal(t, protocol.FinishNone, a.finish, "nothing that looks complete")
		require.Equal(t, expected(len(a.tokens)), append([]uint32{}, a.tokens...))
	}
	require.NoError(t, r.wait())
}

func TestPromptTokensHaveALimitOfTheirOwn(t *testing.T) {
	w := newWorld(t)
	r := w.start("engine.sim.token_delay=20ms", "admission.max_prompt_tokens=6")
	i, c := r.instance(), w.caller()
	for _, codec := range []protocol.Codec{protocol.CodecMsgpack, protocol.CodecJSON} {
		long := ask(8000, nil)
		long.TokenIDs = make([]int32, 7)
		var held *caller.Stream
		var err error
		require.Eventually(t, func() bool { // what came before is held until a moment after its answer
			held, err = c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: codec, Request: long})
			return !errors.Is(err, caller.ErrOverloaded)
		}, patience, time.Millisecond)
		require.NoError(t, err, "alone, a prompt above the limit is served")
		require.NoError(t, held.Prologue())
		_, err = c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: codec, Request: ask(1, nil)})
		require.ErrorIs(t, err, caller.ErrOverloaded)
		require.ErrorContains(t, err, "prompt tokens are the limit")
		require.NoError(t, held.Kill())
		require.Eventually(t, func() bool {
			s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: codec, Request: ask(1, nil)})
			return err == nil && read(s).err == nil
		}, patience, 5*time.Millisecond, "its tokens are given back")
	}
	r.cancel()
	require.NoError(t, r.wait())
}

func TestADeadEngineEndsTheWorkerAndMovesItsRequests(t *testing.T) {
	w := newWorld(t)
	for _, how := range []string{"sim:crash:3", "sim:fatal:3"} {
		r := w.start("engine.sim.token_delay=5ms", "engine.restart.policy=never")
		i, c := r.instance(), w.caller()
		bystander, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(8000, nil)})
		require.NoError(t, err)
		_, err = bystander.Next()
		require.NoError(t, err)
		s, err := c.Do(timeout(t), caller.Call{Transport: i.Transport, Codec: protocol.CodecMsgpack, Request: ask(10, salt(how))})
		require.NoError(t, err)
		a := read(s)
		if strings.HasPrefix(how, "sim:crash") {
			require.Error(t, a.err, "a request that died with its engine has no normal end")
		} else {
			// Its own request is told as a failure and not moved: the next engine would die of it too.
			require.NoError(t, a.err)
			require.Equal(t, protocol.FinishError, a.finish)
		}
		var cut *protocol.Error
		require.ErrorAs(t, read(bystander).err, &cut, how)
		require.True(t, cut.Migratable(), how)
		require.ErrorIs(t, r.wait(), ErrEngineDied, how)
		require.Empty(t, w.records(), how)
	}
}

func TestAWrongAffinitySettingEndsTheWorkerBeforeAnythingIsRegistered(t *testing.T) {
	w := newWorld(t)
	for _, handler := range []string{"unified", "legacy"} {
		for name, c := range map[string]struct {
			settings []string
			target   any
			message  string
		}{
			"build lacks the API, by config":             {[]string{"engine.sim.build=hybrid", "engine.sim.conversation_affinity=true"}, new(*affinity.MissingAPIError), "1.3.0rc20 has no ConversationParams"},
			"build lacks the API, by tolerated override": {[]string{"engine.sim.build=rc19", "affinity.override=true", "affinity.on_disagreement=warn"}, new(*affinity.MissingAPIError), "newer than 1.3.0rc20"},
			"build lacks the API, config unreadable":     {[]string{"engine.sim.build=rc19", "affinity.override=true", "engine.sim.config_unreadable=true"}, new(*affinity.MissingAPIError), "affinity.override"},
			"override against the engine":                {[]string{"affinity.override=true"}, new(*affinity.DisagreementError), affinity.ConfigPath},
		} {
			r := w.launch(append(c.settings, "handler="+handler)...)
			err := r.wait()
			require.ErrorAs(t, err, c.target, "%s: %s", handler, name)
			require.ErrorContains(t, err, c.message, "%s: %s", handler, name)
			require.Empty(t, w.records(), "%s: %s", handler, name)
		}
	}
}

func TestHealthTellsTheTruth(t *testing.T) {
	w := newWorld(t)
	r := w.start("health_check.enabled=true", "health_check.wait=10ms", "health_check.timeout=30s")
	require.Eventually(t, func() bool { status, _ := get(t, r, "/health"); return status == http.StatusOK }, patience, 10*time.Millisecond)
	status, body := get(t, r, "/health")
	require.Equal(t, http.StatusOK, status)
	var ready struct {
		Status    string            `json:"status"`
		Endpoints map[string]string `json:"endpoints"`
	}
	require.NoError(t, json.Unmarshal([]byte(body), &ready))
	require.Equal(t, "ready", ready.Status)
	require.Equal(t, map[string]string{"generate": "ready"}, ready.Endpoints)

	w.nats.Stop()
	require.Eventually(t, func() bool { status, _ := get(t, r, "/health"); return status == http.StatusServiceUnavailable }, patience, 10*time.Millisecond)
	_, body = get(t, r, "/health")
	require.Contains(t, body, "nats")
	status, _ = get(t, r, "/live")
	require.Equal(t, http.StatusOK, status)
	require.NoError(t, w.nats.Start())
	require.Eventually(t, func() bool { status, _ := get(t, r, "/health"); return status == http.StatusOK }, patience, 10*time.Millisecond)
	require.Equal(t, expected(5), read(must(w.caller().Do(timeout(t), caller.Call{Transport: r.instance().Transport, Codec: protocol.CodecMsgpack, Request: ask(5, nil)}))).tokens)
	require.NoError(t, r.stop())
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestACanaryThatGetsNoAnswerTurnsHealth(t *testing.T) {
	w := newWorld(t)
	r := w.start("health_check.enabled=true", "health_check.wait=10ms", "health_check.timeout=50ms", "engine.watch.canary_failures=0", `health_check.payload={"token_ids":[1],"routing":{"cache_salt":"sim:stall"},"stop_conditions":{"max_tokens":1}}`)
	require.Eventually(t, func() bool {
		status, body := get(t, r, "/health")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "health check: no answer within 50ms")
	}, patience, 10*time.Millisecond)
	require.NoError(t, r.stop())
}

func TestTheStartFailsWithTheAddress(t *testing.T) {
	w := newWorld(t)
	etcd, nats := w.etcd.Endpoint(), w.nats.URL()
	w.etcd.Stop()
	require.ErrorContains(t, w.launch("etcd.startup_timeout=1s").wait(), strings.TrimPrefix(etcd, "http://"))
	require.NoError(t, w.etcd.Start())
	w.nats.Stop()
	require.ErrorContains(t, w.launch("nats.startup_timeout=1s").wait(), strings.TrimPrefix(nats, "nats://"))
}

func TestASignalWhileStartingEndsTheWorkerCleanly(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{t: t, world: w, ended: make(chan error, 1), log: &lines{}}
	w.etcd.Stop()
	exe, err := os.Executable()
	require.NoError(t, err)
	cfg := must(load(w.settings([]string{"engine.sim.load_time=1h"})))
	go func() { r.ended <- Run(ctx, cfg, Options{Version: "test", Logger: nopLogger, Executable: exe}) }()
	r.cancel = cancel
	require.NoError(t, r.stop())
}
