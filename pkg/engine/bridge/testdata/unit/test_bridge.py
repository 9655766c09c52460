"""Parts of the bridge that a request over the channel cannot reach."""
import dataclasses
import enum
import json
import pathlib
import types
import unittest
from unittest import mock

from dynworker_bridge import channel, ending, engine, loading, probes, results, serve


class Encode(unittest.TestCase):
    def test_numbers_that_json_lacks_become_null(self):
        text = channel.encode({"a": [1.5, float("-inf"), (float("nan"),)], "b": float("inf")})
        self.assertEqual(json.loads(text), {"a": [1.5, None, [None]], "b": None})


class Plain(unittest.TestCase):
    def test_types_stay_apart(self):
        class Colour(enum.Enum):
            RED = "red"

        class Word(str, enum.Enum):
            YES = "yes"

        @dataclasses.dataclass
        class Section:
            flag: bool
            count: int

        class Model:
            model_fields = {"a": None, "b": None}
            model_extra = {"c": 3}
            a, b, c = Section(True, 1), pathlib.Path("/m"), 3

        self.assertEqual(engine.plain(Model()), {"a": {"flag": True, "count": 1}, "b": "/m", "c": 3})
        got = engine.plain({"x": Colour.RED, "y": Word.YES, "z": {1: (True, None, 1.5)}})
        self.assertEqual(json.dumps(got), '{"x": "red", "y": "yes", "z": {"1": [true, null, 1.5]}}')

    def test_what_is_no_configuration_is_unreadable(self):
        class Broken:
            model_fields = property(lambda self: 1 / 0)

        for value in (None, 5, "text", [1]):
            self.assertIsNone(engine.resolved(value))
        self.assertIsNone(engine.resolved(Broken()))


class Bounds(unittest.TestCase):
    class LLM:
        def __init__(self, **fields):
            self.__dict__.update(fields)

        def generate_async(self, inputs):
            pass

    class Args:
        model = "/nonexistent"
        max_seq_len, max_num_tokens, max_batch_size, max_beam_width = 10, None, 4, 0

    def size(self, **fields):
        return engine.Engine(self.LLM(**fields), "")._vocabulary(self.Args)

    def test_vocabulary(self):
        class Tokens:
            vocab_size = 7

        class Listed(list):
            pass

        class Whole:
            vocab_size = None
            text_config = {"vocab_size": 9}

        self.assertEqual(self.size(_hf_model_config=Tokens(), tokenizer=Listed("ab")), 7)
        self.assertEqual(self.size(_hf_model_config=Whole()), 9)
        self.assertEqual(self.size(tokenizer=Tokens()), 7)
        self.assertEqual(self.size(tokenizer=Listed("ab")), 2)
        self.assertIsNone(self.size())

    def test_only_what_is_known_is_reported(self):
        bounds = engine.Engine(self.LLM(), "")._bounds(self.Args)
        self.assertEqual(bounds, {"max_seq_len": 10, "max_batch_size": 4, "machine_ids": 1021})

    def test_attention_dp_size(self):
        class Parallel:
            tp_size = 8

        class Args:
            enable_attention_dp, tensor_parallel_size = True, 4

        self.assertEqual(engine.attention_dp_size(Args), 4)
        Args.parallel_config = Parallel
        self.assertEqual(engine.attention_dp_size(Args), 8)
        Args.enable_attention_dp = 1
        self.assertEqual(engine.attention_dp_size(Args), 1)


class RequestIds(unittest.TestCase):
    def made_by(self, function):
        with mock.patch.object(probes, "lookup", lambda path: function):
            return probes.request_ids()

    def test_builds_up_to_rc21_take_one_machine_id(self):
        make, machines = self.made_by(lambda machine_id: ("id", machine_id))
        self.assertEqual((make(1020), machines), (("id", 1020), 1021))

    def test_builds_from_rc22_take_node_and_process(self):
        make, machines = self.made_by(lambda node_id, process_id: (node_id, process_id))
        self.assertEqual((make(1020), make(machines - 1), machines), ((15, 60), (255, 63), 16384))

    def test_builds_without_a_maker(self):
        self.assertEqual(self.made_by(None), (None, 0))
        self.assertEqual(self.made_by(lambda a, b, c: None), (None, 0))


class Probes(unittest.TestCase):
    def test_a_function_that_does_not_tell_its_parameters(self):
        self.assertIsNone(probes.parameters(lambda **kw: None))
        self.assertIsNone(probes.parameters(dict.fromkeys.__class__.__call__))
        self.assertEqual(probes.parameters(lambda a, *, b: None), {"a", "b"})

    def test_unknown_is_not_false(self):
        class LLM:
            def generate_async(self, *args, **kwargs):
                pass

        found = probes.capabilities(LLM())
        for name in ("conversation_params", "scheduling_params", "cache_salt", "priority"):
            self.assertIsNone(found[name], name)


class Progress(unittest.TestCase):
    def test_a_stuck_load_looks_stuck(self):
        said, usage = [], [(10.0, 3)]

        class Channel:
            def send_json(self, kind, value):
                said.append(value)

        class Scripted(loading.Progress):
            @staticmethod
            def usage():
                return usage[-1]

        progress = Scripted(Channel(), 5.0)
        for now, speaks in (((10.0, 3), False), ((10.04, 3), False), ((10.2, 3), True),
                            ((10.2, 3), False), ((10.2, 4), True), ((10.2, 3), True)):
            usage.append(now)
            said.clear()
            progress.beat()
            self.assertEqual(bool(said), speaks, now)


class Records(unittest.TestCase):
    def test_log_probabilities_without_alternatives(self):
        got = results.position_layout(0).pack(-0.5, 0)
        self.assertEqual(len(got), 10)
        self.assertEqual(len(results.position_layout(3).pack(-0.5, 3, *(1, 1, -0.5) * 3)), 58)

    def test_performance_figures_where_there_are_any(self):
        class Nothing:
            request_perf_metrics = None

        class Some:
            class request_perf_metrics:
                class kv_cache_metrics:
                    num_reused_blocks, num_missed_blocks = 2, 0

        self.assertIsNone(results.performance([]))
        self.assertIsNone(results.performance([Nothing]))
        self.assertEqual(results.performance([Some]),
                         {"num_reused_blocks": 2, "num_missed_blocks": 0})


class NoMemory(unittest.TestCase):
    """Whatever runs out of memory first, the process has to end, or it holds its GPUs for nothing."""

    def test_without_a_thread_for_the_end_it_comes_at_once(self):
        for error in (RuntimeError("can't start new thread"), MemoryError()):
            with mock.patch.object(ending.threading.Thread, "start", side_effect=error), \
                    mock.patch.object(ending.os, "_exit") as left:
                ending.Ending(None).fatal(MemoryError())
            left.assert_called_once_with(ending.ENGINE_FAILED)

    def test_it_is_not_the_fault_of_the_request(self):
        made = object.__new__(engine.Engine)
        with mock.patch.object(engine.Engine, "_call", side_effect=MemoryError):
            self.assertRaises(MemoryError, made.submit, b"", {})
        with mock.patch.object(engine.Engine, "_call", side_effect=KeyError("sampling")):
            self.assertRaises(engine.Refused, made.submit, b"", {})

    def test_a_reader_that_fails_ends_the_engine(self):
        told = []
        server = types.SimpleNamespace(
            _channel=types.SimpleNamespace(read=mock.Mock(side_effect=MemoryError)),
            ending=types.SimpleNamespace(fatal=told.append, orphaned=lambda: told.append("orphaned")))
        serve.Server.read(server)
        self.assertIsInstance(told[0], MemoryError)


if __name__ == "__main__":
    unittest.main()
