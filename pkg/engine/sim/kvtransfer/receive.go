package kvtransfer

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
)

// Fetch gets a ticket's bytes, has them checked, and acknowledges them. Only
// when it returns no error has the sender been told to forget them. midway is
// called when half of them are here; its error ends the transfer.
func Fetch(ctx context.Context, t Ticket, midway func(context.Context) error, check func([]byte) error) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", t.Address)
	if err != nil {
		err = fmt.Errorf("reach the sender: %w", err)
	} else {
		defer conn.Close()
		defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
		err = fetch(ctx, conn, t, midway, check)
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx) // the closed connection is only how it showed
	}
	return err
}

func fetch(ctx context.Context, conn net.Conn, t Ticket, midway func(context.Context) error, check func([]byte) error) error {
	if err := writeLine(conn, asking{Context: t.Context, Nonce: t.Nonce}); err != nil {
		return fmt.Errorf("ask the sender: %w", err)
	}
	in := bufio.NewReaderSize(conn, maxLine)
	var offer offering
	if err := readLine(in, &offer); err != nil {
		return fmt.Errorf("the sender's answer: %w", err)
	}
	switch {
	case offer.Error != "":
		return fmt.Errorf("the sender says: %s", offer.Error)
	case offer.Context != t.Context:
		return fmt.Errorf("the sender offers context %d", offer.Context)
	case offer.Bytes != t.Bytes:
		return fmt.Errorf("the sender offers %d bytes, %d were announced", offer.Bytes, t.Bytes)
	}
	content := make([]byte, offer.Bytes)
	half := len(content) / 2
	if _, err := io.ReadFull(in, content[:half]); err != nil {
		return fmt.Errorf("the connection ended early: %w", err)
	}
	if err := midway(ctx); err != nil {
		return err
	}
	if _, err := io.ReadFull(in, content[half:]); err != nil {
		return fmt.Errorf("the connection ended early: %w", err)
	}
	if Checksum(content) != t.Checksum {
		return fmt.Errorf("the bytes are not those that were announced")
	}
	if err := check(content); err != nil {
		return err
	}
	if err := writeLine(conn, receipt{Taken: true}); err != nil {
		return fmt.Errorf("acknowledge: %w", err)
	}
	return nil
}
