"""The frontend goes away, does not read, or was never there; and clients that do the same to it."""

import os
import signal
import socket
import threading

from . import client
from .faults import fault
from .scene import ENOUGH, FIXED, MOVED, all_of, later

BOTH = (MOVED, FIXED)


def cancelled(s, cause, by):
    """A probe: the workers together have counted so many requests that ended early for that reason."""
    def total():
        return sum(d.metric("dynworker_cancels_total", cause=c) for d in s.daemons for c in cause.split("|"))
    before = total()

    def probe():
        """requests to be cancelled"""
        grown = total() - before
        return f"{grown:.0f} cancelled" if grown >= by else False
    return probe


@fault("pair", quick=True)
def killed(s):
    open_there = []

    def kill():
        open_there.append(len(s.traffic.in_flight(FIXED)))
        s.frontends[FIXED].process.kill()
    detected = cancelled(s, "reset|kill|stop", ENOUGH)

    def again():
        """a new frontend to serve"""
        if not s.frontends[FIXED].process.running():
            s.start_frontend(FIXED)
            s.traffic.ports[FIXED] = s.frontends[FIXED].api.port
            s.wait_served()
        return True
    s.strike("frontend: SIGKILL with open streams", kill, detected, again, tag=FIXED, cut=(FIXED,))


@fault("pair", quick=True)
def not_reading(s):
    frontend = s.frontends[FIXED].process
    back = threading.Event()

    def stop():
        frontend.signal(signal.SIGSTOP)
        later(6, lambda: (frontend.signal(signal.SIGCONT), back.set()))
    s.strike("frontend: stopped for 6 s (SIGSTOP)", stop, None, all_of(back.is_set, s.answering()), tag=FIXED, whole=BOTH)


@fault("pair")
def clients_not_reading(s):
    """Clients that ask for long texts, never read them and leave."""
    count = 64
    sockets = []

    def ask():
        for i in range(count):
            c = socket.socket()
            c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            c.connect(("127.0.0.1", s.frontends[MOVED].api.port))
            o = client.Outcome("", f"{s.name}-unread-{i}:", 8000)
            c.sendall(client.request(o))
            sockets.append(c)

    before = []

    def strike():
        before.extend(d.accepted() for d in s.daemons)
        ask()
        later(5, lambda: [c.close() for c in sockets])
    detected = cancelled(s, "reset|kill|stop|write", count)
    s.strike(f"clients: {count} ask and never read, leave after 5 s", strike, detected, whole=BOTH)


@fault("pair", quick=True)
def unreachable(s):
    """Requests whose answer address takes connections and never says a word, or nobody is there."""
    errors = [d.metric("dynamo_component_errors_total", error_type="response_stream") for d in s.daemons]

    def failed():
        """the worker to give up on the frontend"""
        grown = s.victim.metric("dynamo_component_errors_total", error_type="response_stream") - errors[0]
        return f"{grown:.0f} given up" if grown >= ENOUGH else False
    s.strike("frontend: answer address that nobody answers, 60 requests", lambda: s.bad_frontend("unreachable", 60), failed,
             s.answering(), at=s.victim, whole=BOTH)


@fault("swift")
def never_reads(s):
    """A frontend that calls for long answers and never reads them."""
    s.bad_frontend("unread", 60, "-tokens", 12000)
    before = s.victim.metric("dynworker_cancels_total", cause="write")

    def given_up():
        """the worker to give up on the frontend"""
        grown = s.victim.metric("dynworker_cancels_total", cause="write") - before
        return f"{grown:.0f} given up" if grown >= ENOUGH else False
    s.strike("frontend: does not read, 60 requests", lambda: None, given_up, s.answering(), at=s.victim, whole=(FIXED,))
