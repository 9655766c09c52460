package sim

// The text of the simulated engine, defined so that it can be computed in any
// language. All numbers are unsigned and 64 bits wide, products and sums are
// taken modulo 2^64, and x>>n is a logical shift.
//
// The state of a sequence of tokens t1, t2, … is
//
//	h = 0x243F6A8885A308D3
//	for each token t:  h = (h XOR t) * 0x9E3779B97F4A7C15;  h = h XOR (h >> 32)
//
// and the token after it, for the choice with index c and the seed s (0 when
// the request names none), is
//
//	x = h XOR (c * 0xD1B54A32D192ED03) XOR (s * 0x8CB92BA72F3D8DD7)
//	x = x XOR (x >> 33);  x = x * 0xFF51AFD7ED558CCD
//	x = x XOR (x >> 33);  x = x * 0xC4CEB9FE1A85EC53
//	x = x XOR (x >> 33)
//	the end token                          if eos_every > 0 and (x >> 32) mod eos_every = 0
//	first + x mod (last - first + 1)       otherwise
//
// Where a text must not end (ignore_eos, or below min_tokens) the token is
// drawn as if eos_every were 0.

// State summarises a sequence of tokens.
type State uint64

// NewState is the state of the empty sequence.
const NewState State = 0x243F6A8885A308D3

// Add returns the state of the sequence with one more token.
func (h State) Add(token int32) State {
	x := (uint64(h) ^ uint64(uint32(token))) * 0x9E3779B97F4A7C15
	return State(x ^ x>>32)
}

// AddAll returns the state of the sequence with more tokens.
func (h State) AddAll(tokens []int32) State {
	for _, t := range tokens {
		h = h.Add(t)
	}
	return h
}

// Text is what the text of an engine depends on besides the sequence.
type Text struct {
	First, Last int32 // range of the tokens that are made up
	EOS         int32
	EOSEvery    int   // 0: a text never ends by itself
	Seed        int64 // of the request
}

// Text returns the text settings of an engine with these arguments, with their
// defaults filled in.
func (a Args) Text() Text {
	a.setDefaults()
	return Text{First: a.FirstTokenID, Last: a.LastTokenID, EOS: a.EOSTokenID, EOSEvery: a.EOSEvery}
}

// draw mixes the state with what sets one choice's text apart from another's.
func (t Text) draw(h State, choice int) uint64 {
	x := uint64(h) ^ uint64(choice)*0xD1B54A32D192ED03 ^ uint64(t.Seed)*0x8CB92BA72F3D8DD7
	x = (x ^ x>>33) * 0xFF51AFD7ED558CCD
	x = (x ^ x>>33) * 0xC4CEB9FE1A85EC53
	return x ^ x>>33
}

// Next returns the token after a sequence with the given state. mayEnd says
// whether the end token may be drawn.
func (t Text) Next(h State, choice int, mayEnd bool) int32 {
	x := t.draw(h, choice)
	if mayEnd && t.EOSEvery > 0 && x>>32%uint64(t.EOSEvery) == 0 {
		return t.EOS
	}
	return t.First + int32(x%uint64(t.Last-t.First+1))
}

// NextToken returns the token that the engine makes up after the whole
// sequence (prompt and output so far) for a choice.
func NextToken(t Text, sequence []int32, choice int) int32 {
	return t.Next(NewState.AddAll(sequence), choice, true)
}

// Continue returns up to n tokens that follow a prompt for a choice; it ends
// early after an end token, which is part of the result.
func Continue(t Text, prompt []int32, choice, n int) []uint32 {
	h := NewState.AddAll(prompt)
	out := make([]uint32, 0, n)
	for range n {
		token := t.Next(h, choice, true)
		out = append(out, uint32(token))
		if token == t.EOS {
			break
		}
		h = h.Add(token)
	}
	return out
}
