"""Engine program: runs TensorRT-LLM for a worker that is at the other end of a socket.

The guard is not a formality: MPI and multiprocessing import the main module again in every rank
they spawn, and a rank must not start a second engine.
"""
if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out
    from dynworker_bridge.main import main

    main()
