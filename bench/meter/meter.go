// Package meter reads from /proc what a process and its descendants cost: CPU time, memory, threads, descriptors, context switches.
package meter

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Cost is what a set of processes has used so far, or holds now.
type Cost struct {
	// CPU is user and system time together, User the first of them.
	CPU, User time.Duration
	// Resident is memory in bytes; pages that processes share count for each.
	Resident uint64
	// Voluntary and Involuntary are context switches: waits, and turns that ended.
	Voluntary, Involuntary uint64
	Threads, Descriptors   int
}

// Sub is what was used between an earlier reading and c; Resident, Threads and Descriptors stay those of c.
func (c Cost) Sub(earlier Cost) Cost {
	c.CPU -= earlier.CPU
	c.User -= earlier.User
	c.Voluntary -= earlier.Voluntary
	c.Involuntary -= earlier.Involuntary
	return c
}

// One reads the cost of a process alone.
func One(pid int) (Cost, error) { return read(pid) }

// Tree reads the cost of a process and all its living descendants. What a descendant used before it ended is not in it.
func Tree(root int) (Cost, error) {
	var sum Cost
	for i, pid := range Descendants(root) {
		c, err := read(pid)
		switch {
		case i > 0 && gone(err):
			continue
		case err != nil:
			return Cost{}, err
		}
		sum.CPU += c.CPU
		sum.User += c.User
		sum.Resident += c.Resident
		sum.Voluntary += c.Voluntary
		sum.Involuntary += c.Involuntary
		sum.Threads += c.Threads
		sum.Descriptors += c.Descriptors
	}
	return sum, nil
}

func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

// Descendants are a process and everything below it, parents first.
func Descendants(root int) []int {
	all := []int{root}
	for i := 0; i < len(all); i++ {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", all[i]))
		for _, name := range threads {
			raw, err := os.ReadFile(name)
			if err != nil {
				continue // the thread has ended
			}
			for word := range strings.FieldsSeq(string(raw)) {
				if pid, err := strconv.Atoi(word); err == nil {
					all = append(all, pid)
				}
			}
		}
	}
	return all
}

// clockTick is the unit of CPU time in /proc, 10 ms on every Linux that Go runs on.
const clockTick = 10 * time.Millisecond

func read(pid int) (c Cost, err error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	raw, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return c, err
	}
	// The name in the second field may hold spaces; what follows its closing parenthesis does not.
	_, rest, _ := strings.Cut(string(raw), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 18 {
		return c, fmt.Errorf("%s/stat has %d fields", dir, len(fields))
	}
	user, err := ticks(fields[11])
	if err != nil {
		return c, err
	}
	system, err := ticks(fields[12])
	if err != nil {
		return c, err
	}
	c.User, c.CPU = user, user+system
	if c.Threads, err = strconv.Atoi(fields[17]); err != nil {
		return c, err
	}
	if c.Resident, err = resident(dir); err != nil {
		return c, err
	}
	// The switches of /proc/PID/status are those of the first thread.
	tasks, err := os.ReadDir(dir + "/task")
	if err != nil {
		return c, err
	}
	for _, t := range tasks {
		voluntary, involuntary, err := switches(filepath.Join(dir, "task", t.Name(), "status"))
		if gone(err) {
			continue
		}
		if err != nil {
			return c, err
		}
		c.Voluntary += voluntary
		c.Involuntary += involuntary
	}
	files, err := os.ReadDir(dir + "/fd")
	c.Descriptors = len(files)
	return c, err
}

func ticks(field string) (time.Duration, error) {
	n, err := strconv.ParseInt(field, 10, 64)
	return time.Duration(n) * clockTick, err
}

func resident(dir string) (bytes uint64, err error) {
	raw, err := os.ReadFile(dir + "/statm")
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(raw))
	if len(fields) < 2 {
		return 0, fmt.Errorf("%s/statm has %d fields", dir, len(fields))
	}
	pages, err := strconv.ParseUint(fields[1], 10, 64)
	return pages * uint64(os.Getpagesize()), err
}

func switches(name string) (voluntary, involuntary uint64, err error) {
	f, err := os.Open(name)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = f.Close() }()
	s := bufio.NewScanner(f)
	for s.Scan() {
		key, value, _ := strings.Cut(s.Text(), ":")
		var into *uint64
		switch key {
		case "voluntary_ctxt_switches":
			into = &voluntary
		case "nonvoluntary_ctxt_switches":
			into = &involuntary
		default:
			continue
		}
		if *into, err = strconv.ParseUint(strings.TrimSpace(value), 10, 64); err != nil {
			return 0, 0, err
		}
	}
	return voluntary, involuntary, s.Err()
}
