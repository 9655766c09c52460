package engine

import (
	"context"
	"fmt"
	"testing"

	"dynworker/pkg/engine/ipc"
)

// BenchmarkDemux hands one step of the engine, a token for each of the streams, to those who wait for it: one operation is one step. "direct" is the way of plain tokens, "queued" what a stream goes through that cannot be written to at once.
func BenchmarkDemux(b *testing.B) {
	for _, streams := range []int{1, 64} {
		b.Run(fmt.Sprintf("direct/streams=%d", streams), func(b *testing.B) {
			p, open := opened(b, streams)
			for _, s := range open {
				s.SetDirect(func(*ipc.Output) (bool, bool) { return true, true })
				_, end := reading(b.Context(), s)
				parked(b, s)
				defer func() {
					s.Close()
					<-end
				}()
			}
			bench(b, p, open, func(*Stream) error { return nil })
		})
		b.Run(fmt.Sprintf("queued/streams=%d", streams), func(b *testing.B) {
			p, open := opened(b, streams)
			ctx := context.Background()
			bench(b, p, open, func(s *Stream) error {
				_, err := s.Next(ctx)
				return err
			})
		})
	}
}

func opened(b *testing.B, n int) (*Process, []*Stream) {
	p, other := attach(b, Config{})
	open := make([]*Stream, n)
	for i := range open {
		open[i] = generate(b, p, other, ipc.Generate{})
	}
	return p, open
}

func bench(b *testing.B, p *Process, open []*Stream, read func(*Stream) error) {
	var step []byte
	for _, s := range open {
		step = append(ipc.AppendRecordHead(step, s.ID(), 0, 0, 1), 42, 0, 0, 0)
	}
	d := demux{p: p}
	b.ReportAllocs()
	for b.Loop() {
		if err := d.handle(ipc.KindOutputs, step); err != nil {
			b.Fatal(err)
		}
		for _, s := range open {
			if err := read(s); err != nil {
				b.Fatal(err)
			}
		}
	}
}
