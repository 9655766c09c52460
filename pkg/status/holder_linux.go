package status

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// findHolder looks up who listens on a TCP port. It returns nil when that
// cannot be seen: the process may belong to somebody else or live in another
// container with the same network.
func findHolder(port int) *Holder {
	inodes := make(map[string]bool)
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		if f, err := os.Open(table); err == nil {
			listeningInodes(f, port, inodes)
			_ = f.Close()
		}
	}
	if len(inodes) == 0 {
		return nil
	}
	fds, err := filepath.Glob("/proc/[0-9]*/fd/[0-9]*")
	if err != nil {
		return nil
	}
	for _, fd := range fds {
		target, err := os.Readlink(fd)
		if err != nil {
			continue
		}
		inode, ok := strings.CutPrefix(target, "socket:[")
		if !ok || !inodes[strings.TrimSuffix(inode, "]")] {
			continue
		}
		dir := filepath.Dir(filepath.Dir(fd))
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		name, _ := os.ReadFile(filepath.Join(dir, "comm")) // optional
		return &Holder{PID: pid, Name: strings.TrimSpace(string(name))}
	}
	return nil
}

// listeningInodes adds the inodes of the sockets that listen on port to into.
// r has the format of /proc/net/tcp: one socket a line, the second field
// HEXADDRESS:HEXPORT, the fourth the state (0A is "listens"), the tenth the
// inode.
func listeningInodes(r io.Reader, port int, into map[string]bool) {
	const stateListen = "0A"
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 || f[3] != stateListen {
			continue
		}
		_, hexPort, ok := strings.Cut(f[1], ":")
		if !ok {
			continue
		}
		if p, err := strconv.ParseUint(hexPort, 16, 16); err == nil && int(p) == port {
			into[f[9]] = true
		}
	}
}
