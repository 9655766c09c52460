package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"dynworker/pkg/engine/ipc"
)

// Options are the surroundings of a simulated engine.
type Options struct {
	Clock Clock // nil is the system's clock

	// exit ends the process while the channel is open, as a crash does; nil
	// where the engine has no process of its own.
	exit func(code int)
}

// Main runs a simulated engine on the channel that the environment names, and
// returns the process's exit status: 0 after a shutdown message, 1 when the
// engine failed or its worker is gone, 2 when it was not started by a worker,
// 134 (as after an abort) when a request asked for a crash. A request can also
// ask for an end with 0.
func Main() int {
	conn, err := channel()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	fmt.Println("simulated engine: there is no model to load") // engines chat on stdout, and so does this one
	if err = Run(context.Background(), conn, Options{exit: os.Exit}); err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// errByHand is what a person reads who runs the engine from a shell.
var errByHand = errors.New("this is the worker's simulated engine; the worker starts it itself when its configuration says engine.kind: sim")

// channel opens the engine's end of the channel and keeps it from being
// inherited by any process that the engine might start.
func channel() (net.Conn, error) {
	name, ok := os.LookupEnv(ipc.EnvFD)
	if !ok {
		return nil, errByHand
	}
	fd, err := strconv.Atoi(name)
	if err != nil || fd < 0 {
		return nil, fmt.Errorf("%s=%q is no file descriptor", ipc.EnvFD, name)
	}
	syscall.CloseOnExec(fd)
	file := os.NewFile(uintptr(fd), "engine channel")
	defer file.Close() // the connection works on a duplicate
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("file descriptor %d is not the engine's channel: %w", fd, err)
	}
	return conn, nil
}

// InProcess runs a simulated engine in this process and returns the worker's
// end of its channel. The engine ends when that is closed, with ctx, or after a
// shutdown message; ended then receives Run's result.
func InProcess(ctx context.Context, o Options) (conn net.Conn, ended <-chan error) {
	ours, theirs := net.Pipe()
	result := make(chan error, 1)
	go func() { result <- Run(ctx, theirs, o) }()
	return ours, result
}

// Run is an engine's life on a channel: hello, configure, load, ready, and
// then requests until it is told to stop, the channel ends, ctx is done, or a
// request makes it fail. It closes conn. A nil error is an orderly end; the
// others are ErrWorkerGone, ErrCrashed, ErrLeft, *ArgError and *FatalError.
func Run(ctx context.Context, conn io.ReadWriteCloser, o Options) error {
	if o.Clock == nil {
		o.Clock = systemClock{}
	}
	mail := newMailbox()
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		read(ipc.NewReader(conn, ipc.MaxPayload), mail)
	}()
	defer func() {
		_ = conn.Close()
		<-reading
	}()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()

	s := starter{conn: conn, mail: mail, clock: o.Clock}
	e, err := s.start()
	if err != nil || e == nil {
		return err
	}
	defer e.calls.close()
	defer e.links.close()
	err = e.run()
	if o.exit != nil {
		switch {
		case errors.Is(err, ErrLeft):
			o.exit(0)
		case errors.Is(err, ErrCrashed):
			o.exit(134)
		}
	}
	return err
}

// Mail besides the protocol's own types.
type (
	cancelID    uint64
	badGenerate struct {
		id  uint64
		err error
	}
)

// read turns the worker's messages into mail until the channel ends.
func read(r *ipc.Reader, mail *mailbox) {
	for {
		kind, payload, err := r.Next()
		if err != nil {
			mail.put(workerGone(err))
			return
		}
		mail.put(parse(kind, payload))
	}
}

func parse(kind ipc.Kind, payload []byte) any {
	var m any
	var err error
	switch kind {
	case ipc.KindConfigure:
		m, err = ipc.ParseConfigure(payload)
	case ipc.KindGenerate:
		var req ipc.Request
		if req, err = ipc.ParseGenerate(payload); err != nil && len(payload) >= 8 {
			return badGenerate{id: req.ID, err: err}
		}
		m = req
	case ipc.KindCancel:
		var id uint64
		id, err = ipc.ParseCancel(payload)
		m = cancelID(id)
	case ipc.KindQuery:
		m, err = ipc.ParseQuery(payload)
	case ipc.KindShutdown:
		m, err = ipc.ParseShutdown(payload)
	default:
		err = fmt.Errorf("a %v message flows from the engine, not to it", kind)
	}
	if err != nil {
		return fatal("ProtocolError", err.Error())
	}
	return m
}

// starter is an engine before it is ready.
type starter struct {
	conn  io.Writer
	mail  *mailbox
	clock Clock
}

// start goes through the handshake. It returns nil and no error when a
// shutdown message came before the engine was ready.
func (s *starter) start() (*engine, error) {
	if err := s.send(ipc.Hello{Protocol: ipc.Version, Engine: "sim", Version: "1", PID: os.Getpid()}); err != nil {
		return nil, err
	}
	conf, err := s.configure()
	if err != nil {
		return nil, s.fail(err)
	}
	if conf == nil {
		return nil, nil
	}
	args, build, err := parseArgs(conf.Args)
	if err != nil {
		return nil, s.fail(err)
	}
	calls, err := openCallLog(args.CallsLog)
	if err != nil {
		return nil, s.fail(&ArgError{Key: "calls_log", Reason: err.Error()})
	}
	calls.add(s.clock.Now(), call{Event: "start", Args: conf.Args})
	e, err := s.load(args, build, calls)
	if e == nil || err != nil {
		calls.close()
	}
	return e, err
}

// configure waits for the configure message; nil without an error means that a
// shutdown came instead.
func (s *starter) configure() (*ipc.Configure, error) {
	for {
		m, ok := s.mail.pop()
		if !ok {
			<-s.mail.wake
			continue
		}
		switch m := m.(type) {
		case ipc.Configure:
			if m.Protocol != ipc.Version {
				return nil, fmt.Errorf("the worker speaks engine protocol %d, this engine speaks %d", m.Protocol, ipc.Version)
			}
			return &m, nil
		case ipc.Shutdown:
			return nil, s.send(ipc.Goodbye{Reason: "shutdown"})
		case error:
			return nil, m
		default:
			return nil, errors.New("the first message is not configure")
		}
	}
}

// loadSteps is how many progress messages tell about the load time.
const loadSteps = 10

// load spends the load time and says ready.
func (s *starter) load(args Args, build Build, calls *callLog) (*engine, error) {
	for i := range loadSteps {
		fraction := float64(i) / loadSteps
		if err := s.send(ipc.Progress{Phase: "loading", Fraction: &fraction}); err != nil {
			return nil, err
		}
		if end, err := s.pause(time.Duration(args.LoadTime) / loadSteps); end {
			return nil, err
		}
	}
	ready, err := args.ready(build)
	if err != nil {
		return nil, s.fail(err)
	}
	if err := s.send(ready); err != nil {
		return nil, err
	}
	e := newEngine(args, build, s.clock, s.conn, s.mail, calls)
	return e, e.report(s.clock.Now(), true)
}

// pause lets time pass, but not the end of the worker or a shutdown.
func (s *starter) pause(d time.Duration) (end bool, err error) {
	fires, stop := s.clock.Timer(s.clock.Now().Add(d))
	defer stop()
	for {
		if m, ok := s.mail.pop(); ok {
			switch m := m.(type) {
			case ipc.Shutdown:
				return true, s.send(ipc.Goodbye{Reason: "shutdown"})
			case error:
				return true, m
			default:
				return true, s.fail(errors.New("a message came before the engine was ready"))
			}
		}
		if d <= 0 {
			return false, nil
		}
		select {
		case <-fires:
			return false, nil
		case <-s.mail.wake:
		}
	}
}

// fail tells the worker why the engine does not start.
func (s *starter) fail(cause error) error {
	if errors.Is(cause, ErrWorkerGone) {
		return cause
	}
	_ = s.send(ipc.Fatal{ErrorType: "ValueError", Message: cause.Error()})
	return cause
}

func (s *starter) send(m ipc.Message) error {
	frame, err := ipc.AppendMessage(nil, m)
	if err == nil {
		_, err = s.conn.Write(frame)
	}
	return workerGone(err)
}
