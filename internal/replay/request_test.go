package replay

import (
	"testing"

	"dynworker/pkg/protocol"
)

// replayAll sends the recorded requests of a folder to one worker, one after the other, ends the worker, and compares: only then is it sure that the engine was asked for nothing more.
func replayAll(t *testing.T, folder string, s setup) {
	cases := recordings(t, folder)
	w := run(t, s)
	answers := map[string][]event{}
	for _, r := range cases {
		answers[r.name] = w.ask(r.question())
		if recordedSide(t, r).aborts > 0 {
			id := r.recordedID()
			w.await(r.name+" is aborted", func(byID map[string]*engineSide, _ []*engineSide) bool { return byID[id] != nil && byID[id].aborts > 0 })
		}
	}
	if code := w.stop(); code != 0 {
		t.Errorf("the worker ended with code %d", code)
	}
	byID, _ := sortByRequest(w.engineLog())
	for _, r := range cases {
		t.Run(r.name, func(t *testing.T) {
			settle(t, r.name, r.compare(t, byID[r.recordedID()], answers[r.name]))
		})
	}
}

// recordedSide is the engine's side of a recording.
func recordedSide(t *testing.T, r *recording) *engineSide {
	byID, nameless := sortByRequest(listOf(r.fields["engine"]))
	for _, e := range byID {
		return e
	}
	if len(nameless) > 0 {
		return nameless[0]
	}
	return &engineSide{}
}

// compare lists the differences between a recorded request and ours.
func (r *recording) compare(t *testing.T, engine *engineSide, answer []event) []difference {
	if engine == nil {
		engine = &engineSide{}
	}
	recorded, ours := canonicalAnswer(r.frames), canonicalAnswer(answer)
	if recordedSide(t, r).aborts > 0 {
		cut(recorded, ours)
	}
	return diff("", protocol.Map{"engine": recordedSide(t, r).canonical(), "frames": recorded}, protocol.Map{"engine": engine.canonical(), "frames": ours})
}

func TestCore(t *testing.T) {
	replayAll(t, "core", setup{engine: protocol.Map{"max_seq_len": int64(8192)}, settings: []string{"handler=legacy"}})
}

func TestCoreWithoutAContextLength(t *testing.T) {
	replayAll(t, "core-no-max-seq-len", setup{settings: []string{"handler=legacy"}})
}

// inRole is a worker of a disaggregated model.
func inRole(role string, standin ...string) setup {
	return setup{engine: protocol.Map{"max_seq_len": int64(8192)}, settings: []string{"handler=legacy", "disaggregation.transfer_timeout=50ms"}, flags: []string{"--disaggregation-mode", role}, standin: standin}
}

func TestPrefill(t *testing.T) { replayAll(t, "prefill", inRole("prefill")) }

func TestDecode(t *testing.T) { replayAll(t, "decode", inRole("decode")) }

func TestDecodeCancel(t *testing.T) {
	replayAll(t, "decode-cancel", inRole("decode", "STANDIN_DELAY_MS=200"))
}

func TestCancel(t *testing.T) {
	replayAll(t, "cancel", setup{standin: []string{"STANDIN_DELAY_MS=30"}, engine: protocol.Map{"max_seq_len": int64(8192)}, settings: []string{"handler=legacy"}})
}
