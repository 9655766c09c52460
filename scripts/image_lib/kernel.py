"""Namespaces of this process, so that nothing has to be cleaned up after it."""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _unshare(what):
    if _libc.unshare(what) != 0:
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))


def private_mounts():
    """From here on mounts of this process and its children are seen by nobody else, and end with them."""
    _unshare(CLONE_NEWNS)
    run("mount", "--make-rprivate", "/")


def private_network():
    """From here on this process and its new children have a loopback interface of their own, and nothing else."""
    _unshare(CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        name = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(s, SIOCGIFFLAGS, name))[1]
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))


class StepFailed(Exception):
    """A command did not do what it had to."""


def run(*argv, **kwargs):
    """Runs a command and returns what it printed."""
    done = subprocess.run([str(a) for a in argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", **kwargs)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-20:])
        raise StepFailed(f"{' '.join(map(str, argv))[:200]}: exit code {done.returncode}\n{tail}")
    return done.stdout


def bind(source, target, readonly=False):
    os.makedirs(target, exist_ok=True)
    run("mount", "--bind", source, target)
    if readonly:
        run("mount", "-o", "remount,bind,ro", target)
