package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"dynworker/testdata"
)

// tokenizer turns text into the ids of the test model and back. It knows byte-level vocabularies and takes the longest word that fits, which is enough to read along; the frontend does this properly.
type tokenizer struct {
	ids   map[string]int32
	words []string
	// letter is the printable stand-in of each byte in the vocabulary, raw the way back.
	letter [256]rune
	raw    map[rune]byte
}

func newTokenizer() (*tokenizer, error) {
	data, err := testdata.ModelFile("tokenizer.json")
	if err != nil {
		return nil, err
	}
	var file struct {
		Model struct {
			Vocab map[string]int32 `json:"vocab"`
		} `json:"model"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("tokenizer.json: %w", err)
	}
	t := &tokenizer{ids: file.Model.Vocab, words: make([]string, len(file.Model.Vocab)), raw: map[rune]byte{}}
	for word, id := range t.ids {
		if int(id) >= len(t.words) {
			return nil, fmt.Errorf("tokenizer.json: id %d is beyond the vocabulary", id)
		}
		t.words[id] = word
	}
	// Byte-level vocabularies write a printable Latin-1 byte as itself and the others as the code points from 256 on.
	next := rune(256)
	for b := range 256 {
		r := rune(b)
		if !(b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae) {
			r = next
			next++
		}
		t.letter[b], t.raw[r] = r, byte(b)
	}
	return t, nil
}

func (t *tokenizer) encode(text string) []int32 {
	var b strings.Builder
	for _, c := range []byte(text) {
		b.WriteRune(t.letter[c])
	}
	letters := []rune(b.String())
	var ids []int32
	for len(letters) > 0 {
		n := len(letters)
		for ; n > 0; n-- {
			if id, ok := t.ids[string(letters[:n])]; ok {
				ids = append(ids, id)
				break
			}
		}
		letters = letters[max(n, 1):]
	}
	return ids
}

func (t *tokenizer) decode(ids []uint32) string {
	var out []byte
	for _, id := range ids {
		if int(id) >= len(t.words) {
			continue
		}
		for _, r := range t.words[id] {
			if b, ok := t.raw[r]; ok {
				out = append(out, b)
			}
		}
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return '·'
		}
		return r
	}, strings.ToValidUTF8(string(out), "·"))
}
