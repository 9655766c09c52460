"""The parts of scripts/chaos: the daemon under load beside real servers, and everything that can go wrong with any of them.

A scene (scene.py) is etcd, NATS, workers, two frontends and clients that never
stop asking. A fault is a function of a scene in one of the modules *_faults.py;
it strikes while at least 50 requests are in flight, says by what it must be
noticed and when service must be whole again. Every answer is judged against a
text that is computed here (text.py), not taken from any run.

Provisioning, servers and processes come from interop_lib. As there, only the
Python standard library is used and nothing knows the inside of the daemon.
"""
