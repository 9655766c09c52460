package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	"dynworker/bench/meter"
)

// frameSize is about what a frame with one token takes on the wire.
const frameSize = 160

// floorCommand makes this program the floor itself: "peers floor ADDRESS STREAMS TOKENS DELAY" connects, writes and waits to be told to end.
const floorCommand = "floor"

// floor is the least that serving tokens can cost: a bare loop in Go that writes one frame for each token to the connection of its stream, and does nothing else.
func floor(args []string) error {
	streams, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	tokens, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	delay, err := time.ParseDuration(args[3])
	if err != nil {
		return err
	}
	conns := make([]net.Conn, streams)
	for i := range conns {
		if conns[i], err = net.Dial("tcp", args[0]); err != nil {
			return err
		}
	}
	frame := make([]byte, frameSize)
	var tick <-chan time.Time
	if delay > 0 {
		t := time.NewTicker(delay)
		defer t.Stop()
		tick = t.C
	}
	for range tokens {
		if tick != nil {
			<-tick
		}
		for _, c := range conns {
			if _, err := c.Write(frame); err != nil {
				return err
			}
		}
	}
	fmt.Println("written")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// measureFloor runs the floor in a process of its own and reads what it writes.
func measureFloor(s shape) (sample, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return sample{}, err
	}
	defer func() { _ = ln.Close() }()
	self, err := os.Executable()
	if err != nil {
		return sample{}, err
	}
	perStream := max(s.requests*s.tokens/s.streams, 1)
	cmd := exec.Command(self, floorCommand, ln.Addr().String(), strconv.Itoa(s.streams), strconv.Itoa(perStream), s.delay.String())
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return sample{}, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return sample{}, err
	}
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		return sample{}, err
	}
	var readers sync.WaitGroup
	for range s.streams {
		c, err := ln.Accept()
		if err != nil {
			return sample{}, err
		}
		readers.Go(func() {
			defer func() { _ = c.Close() }()
			// Its end is the end of the process.
			_, _ = io.CopyN(io.Discard, c, int64(perStream*frameSize))
		})
	}
	word := make([]byte, len("written\n"))
	if _, err := io.ReadFull(out, word); err != nil {
		return sample{}, fmt.Errorf("floor: %w", err)
	}
	took := time.Since(begin)
	cost, err := meter.One(cmd.Process.Pid)
	if err != nil {
		return sample{}, err
	}
	readers.Wait()
	_ = in.Close()
	if err := cmd.Wait(); err != nil {
		return sample{}, err
	}
	return newSample(cost, meter.Cost{}, perStream*s.streams, perStream*s.streams, s.streams, took), nil
}
