// Package kvtransfer moves what a simulated engine has computed of a prompt to
// the engine that makes the text, as a disaggregated deployment moves KV cache
// blocks from prefill to decode. The bytes really travel from process to
// process, over TCP, and are all that the receiver can go on from.
//
// A transfer is one connection. The receiver writes a line of JSON with the
// context's id and the nonce of its ticket. The sender answers with a line that
// has the id and the number of bytes, and with the bytes; or with a line that
// has an error. Once the receiver has found the bytes to be right it writes an
// acknowledgement, and then the sender forgets the context. Without one the
// sender keeps it: the receiver may have died.
package kvtransfer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
)

// MaxBytes bounds one transfer.
const MaxBytes = 1 << 26

// maxLine bounds a line of either side.
const maxLine = 4096

// Ticket says where a prompt's cache is to be had. It travels through the
// worker and the frontend, to which it is opaque.
type Ticket struct {
	Address  string `json:"address"` // of the sender, host:port
	Context  uint64 `json:"context"` // id of the prefilled request
	Nonce    string `json:"nonce"`   // tells this context from another one with its id
	Blocks   int    `json:"blocks"`
	Bytes    int    `json:"bytes"`
	Checksum uint64 `json:"checksum"` // of the bytes
}

// Encode returns the ticket as the opaque state of a hand-off.
func (t Ticket) Encode() []byte {
	b, err := json.Marshal(t)
	if err != nil {
		panic(err) // a struct of text and numbers cannot fail to encode
	}
	return b
}

// ParseTicket reads what Encode wrote, and refuses anything else.
func ParseTicket(b []byte) (Ticket, error) {
	var t Ticket
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&t); err != nil {
		return Ticket{}, fmt.Errorf("opaque state is no ticket of a simulated engine: %w", err)
	}
	if d.InputOffset() != int64(len(b)) {
		return Ticket{}, errors.New("opaque state has something behind its ticket")
	}
	switch {
	case t.Address == "":
		return Ticket{}, errors.New("opaque state: address is empty")
	case t.Bytes < 0 || t.Bytes > MaxBytes:
		return Ticket{}, fmt.Errorf("opaque state: bytes is %d, allowed are 0 to %d", t.Bytes, MaxBytes)
	case t.Blocks < 0:
		return Ticket{}, fmt.Errorf("opaque state: blocks is %d", t.Blocks)
	}
	return t, nil
}

// Checksum is the sum that a ticket has of the bytes.
func Checksum(b []byte) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(b) // a hash does not fail
	return h.Sum64()
}

// Block is a part of a prompt's cache: its tokens and the state of the sequence
// after them.
type Block struct {
	Tokens []int32
	State  uint64
}

// AppendBlocks appends the bytes of a cache to dst: for each block the number
// of its tokens (4 bytes), the tokens (4 bytes each) and the state (8 bytes),
// all little-endian.
func AppendBlocks(dst []byte, blocks []Block) []byte {
	for _, b := range blocks {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(b.Tokens)))
		for _, t := range b.Tokens {
			dst = binary.LittleEndian.AppendUint32(dst, uint32(t))
		}
		dst = binary.LittleEndian.AppendUint64(dst, b.State)
	}
	return dst
}

// ParseBlocks reads what AppendBlocks wrote.
func ParseBlocks(b []byte) ([]Block, error) {
	var blocks []Block
	for len(b) > 0 {
		if len(b) < 4 {
			return nil, fmt.Errorf("block %d is cut off", len(blocks))
		}
		n := uint64(binary.LittleEndian.Uint32(b))
		b = b[4:]
		if uint64(len(b)) < 4*n+8 {
			return nil, fmt.Errorf("block %d is cut off", len(blocks))
		}
		block := Block{Tokens: make([]int32, n)}
		for i := range block.Tokens {
			block.Tokens[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
		}
		block.State = binary.LittleEndian.Uint64(b[4*n:])
		b = b[4*n+8:]
		blocks = append(blocks, block)
	}
	return blocks, nil
}
