package sim

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// The numbers come from a program in another language that was written after
// the definition in token.go.
func TestTextIsAsDefined(t *testing.T) {
	text := Args{}.Text()
	prompt := []int32{5, 6, 7}
	require.Equal(t, []uint32{117, 124, 309, 241, 67, 180, 299, 134}, Continue(text, prompt, 0, 8))
	require.Equal(t, []uint32{354, 44, 348, 95, 297, 128, 182, 301}, Continue(text, prompt, 1, 8))
	seeded := text
	seeded.Seed = 42
	require.Equal(t, []uint32{45, 188, 315, 206, 162, 327, 117, 206}, Continue(seeded, prompt, 0, 8))
	seeded.Seed = -1
	require.Equal(t, []uint32{188, 200, 41, 83}, Continue(seeded, prompt, 0, 4))
	ending := text
	ending.EOSEvery = 5
	require.Equal(t, []uint32{117, 124, 309, 241, 67, 180, 2}, Continue(ending, prompt, 0, 12))
	require.Equal(t, []uint32{272, 268, 278, 288, 272, 348, 267, 309}, Continue(Args{FirstTokenID: 262}.Text(), prompt, 0, 8))
	require.EqualValues(t, 117, NextToken(text, prompt, 0))
}

// Wherever a text is cut, it goes on as if it had not been.
func TestTextContinuesAnywhere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prompt := rapid.SliceOfN(rapid.Int32Range(0, 354), 1, 40).Draw(t, "prompt")
		choice := rapid.IntRange(0, 5).Draw(t, "choice")
		text := Args{EOSEvery: rapid.IntRange(0, 20).Draw(t, "eos_every")}.Text()
		text.Seed = rapid.Int64().Draw(t, "seed")
		whole := Continue(text, prompt, choice, 30)
		cut := rapid.IntRange(0, len(whole)-1).Draw(t, "cut")
		for _, token := range whole[:cut] {
			prompt = append(prompt, int32(token))
		}
		require.Equal(t, whole[cut:], Continue(text, prompt, choice, 30)[:len(whole)-cut])
		for _, token := range whole {
			require.True(t, int32(token) == text.EOS || (int32(token) >= text.First && int32(token) <= text.Last))
		}
	})
}

func BenchmarkNext(b *testing.B) {
	text := Args{}.Text()
	h := NewState
	for b.Loop() {
		h = h.Add(text.Next(h, 0, true))
	}
}
