package caller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"dynworker/pkg/ingress"
	"dynworker/pkg/protocol"
	"dynworker/pkg/wire"
)

// Call is one request.
type Call struct {
	// Transport and Codec come from the instance record of the worker.
	Transport protocol.Transport
	Codec     protocol.Codec
	// Request is the body. Body, when not nil, is sent in its place as it is.
	Request *protocol.Request
	Body    []byte
	// ID is the request id, empty for a new one.
	ID string
	// Headers are added to those that the frontend always sends (request-id, x-frontend-send-ts-ns); an empty value removes one.
	Headers  map[string]string
	Metadata map[string]string
	// CallHomeTimeout is how long the worker may take to connect after its reply, default 10 s. The frontend has no such limit.
	CallHomeTimeout time.Duration
	// Trace keeps all frames for Stream.Frames.
	Trace bool
	// KeepOpen leaves the connection open after the end mark, for AwaitClose. A frontend closes it.
	KeepOpen bool

	// Edit changes the control header, and Mangle the whole message, before it is sent. They are for requests that no frontend sends.
	Edit   func(*wire.RequestControl)
	Mangle func(message []byte) []byte
}

// Do sends the request and returns when the worker has called home. The context bounds the whole stream: when it ends, Next returns its cause.
// The stream must be closed.
func (c *Caller) Do(ctx context.Context, call Call) (*Stream, error) {
	subject := uuid.NewString()
	homeCh, err := c.expect(subject)
	if err != nil {
		return nil, err
	}
	defer c.forget(subject, homeCh)
	message, headers := c.message(&call, subject)
	reply, err := c.send(ctx, &call, message, headers)
	if err != nil {
		return nil, err
	}
	if kind, reason := wire.ParseReply(reply); kind != wire.ReplyAccepted {
		return nil, &RefusedError{Kind: kind, Reason: reason}
	}
	timeout := call.CallHomeTimeout
	if timeout <= 0 {
		timeout = defaultCallHomeTimeout
	}
	wait := time.NewTimer(timeout)
	defer wait.Stop()
	select {
	case h := <-homeCh:
		return c.newStream(ctx, &call, h)
	case <-wait.C:
		return nil, fmt.Errorf("%w in %s", ErrNoCallHome, timeout)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// message builds the two-part frame and the headers that go with it.
func (c *Caller) message(call *Call, subject string) ([]byte, map[string]string) {
	if call.ID == "" {
		call.ID = uuid.NewString()
	}
	control := wire.RequestControl{
		ID: call.ID, RequestType: wire.RequestSingleIn, ResponseType: wire.ResponseManyOut, PayloadCodec: call.Codec.String(),
		Connection: wire.ConnectionInfo{
			Transport: wire.TransportTCP, Address: c.Address(), Subject: subject, Context: call.ID, StreamType: wire.StreamTypeResponse,
		},
		Metadata: call.Metadata,
	}
	if call.Edit != nil {
		call.Edit(&control)
	}
	body := call.Body
	if body == nil && call.Request != nil {
		body = call.Request.Append(nil, call.Codec)
	}
	message := wire.AppendFrame(nil, wire.AppendRequestControl(nil, &control), body)
	if call.Mangle != nil {
		message = call.Mangle(message)
	}
	headers := map[string]string{
		ingress.HeaderRequestID: call.ID,
		ingress.HeaderSentNanos: strconv.FormatInt(time.Now().UnixNano(), 10),
	}
	maps.Copy(headers, call.Headers)
	maps.DeleteFunc(headers, func(_, value string) bool { return value == "" })
	return message, headers
}

func (c *Caller) send(ctx context.Context, call *Call, message []byte, headers map[string]string) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.ReplyTimeout, ErrNoReply)
	defer cancel()
	switch call.Transport.Kind {
	case protocol.TransportNATS:
		return c.sendNATS(ctx, call.Transport.Address, message, headers)
	case protocol.TransportTCP:
		return c.sendTCP(ctx, call.Transport.Address, message, headers)
	default:
		return nil, fmt.Errorf("transport %q is unknown", call.Transport.Kind)
	}
}

func (c *Caller) sendNATS(ctx context.Context, subject string, message []byte, headers map[string]string) ([]byte, error) {
	if c.nats == nil {
		return nil, ErrNoNATS
	}
	msg := &nats.Msg{Subject: subject, Data: message, Header: nats.Header{}}
	for name, value := range headers {
		msg.Header.Set(name, value)
	}
	if limit := c.nats.MaxPayload(); int64(msg.Size()-len(subject)) > limit {
		return nil, &PayloadLimitError{Plane: "nats", Size: int64(msg.Size() - len(subject)), Limit: limit}
	}
	reply, err := c.nats.RequestMsgWithContext(ctx, msg)
	switch {
	case err == nil:
		return reply.Data, nil
	case errors.Is(err, nats.ErrNoResponders):
		return nil, fmt.Errorf("send request to %s: %w", subject, ErrNoResponders)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("send request to %s: %w", subject, context.Cause(ctx))
	default:
		return nil, fmt.Errorf("send request to %s: %w", subject, err)
	}
}

func (c *Caller) sendTCP(ctx context.Context, address string, message []byte, headers map[string]string) ([]byte, error) {
	addr, path, err := wire.SplitPlaneAddress(address)
	if err != nil {
		return nil, err
	}
	headers["x-endpoint-path"] = path
	raw, err := wire.AppendPlaneRequest(nil, &wire.PlaneRequest{Path: path, Headers: headers, Payload: message})
	if err != nil {
		return nil, fmt.Errorf("send request to %s: %w", address, err)
	}
	if limit := c.cfg.MaxMessage; limit > 0 && len(raw) > limit {
		return nil, &PayloadLimitError{Plane: "tcp", Size: int64(len(raw)), Limit: int64(limit)}
	}
	reply, err := c.planes.roundTrip(ctx, addr.String(), raw)
	if err != nil {
		return nil, fmt.Errorf("send request to %s: %w", address, err)
	}
	return reply, nil
}
