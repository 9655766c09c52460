"""The parts of scripts/interop: everything that is needed to put the worker
daemon beside the real Dynamo frontend and to look at both from outside.

Only the Python standard library is used, and nothing here knows the inside of
the daemon: it is driven through its command line and configuration, and
watched through HTTP, etcd, its exit code and the call log of its engine,
which is simulated or, in affinity.py, a stand-in for tensorrt_llm.
"""
