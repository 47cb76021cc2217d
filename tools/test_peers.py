"""Tests of tools/peers_worker.py and tools/peers_engines.py, with a library and a file in place of llama.cpp and its models."""

import ctypes
import os
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import peers_engines
import peers_worker


class Library:
    """As llama.cpp's, it counts the contexts that are open."""

    LLAMA_FLASH_ATTN_TYPE_ENABLED, LLAMA_FLASH_ATTN_TYPE_DISABLED = 1, 0
    llama_token = ctypes.c_int32

    def __init__(self):
        self.open, self.most, self.decoded = [], 0, []

    def llama_context_default_params(self):
        return SimpleNamespace(n_batch=2048, n_ubatch=512)

    def llama_init_from_model(self, _model, params):
        context = SimpleNamespace(flash=params.flash_attn_type)
        self.open.append(context)
        self.most = max(self.most, len(self.open))
        return context

    def llama_free(self, context):
        self.open.remove(context)

    def llama_decode(self, context, batch):
        self.decoded.append((context.flash, batch))
        return 0

    def llama_batch_get_one(self, _tokens, count):
        return count

    def llama_vocab_bos(self, _vocab):
        return 1

    def llama_get_memory(self, context):
        return context

    def llama_memory_clear(self, _memory, _data):
        pass


class LlamaCpp(unittest.TestCase):
    def test_one_context_is_open_at_a_time_and_touched_when_it_is_new(self):
        engine = object.__new__(peers_worker.LlamaCpp)
        engine.lib, engine.model, engine.vocab, engine.path, engine.threads = Library(), "model", "vocab", "path", 2
        engine.tokens, engine.context, engine.flash = 300, None, None
        for flash in [True, True, False, True]:
            session = engine.session({"flash": flash})
            self.assertEqual((session.context.flash, len(engine.lib.open)), (int(flash), 1))
        self.assertEqual(engine.lib.most, 1)
        self.assertEqual(engine.lib.decoded, [(1, 300), (0, 300), (1, 300)])


class Requantized(unittest.TestCase):
    def test_models_of_one_name_have_files_of_their_own(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            models = [root / name / "model.gguf" for name in "ab"]
            for model in models:
                model.parent.mkdir()
                model.touch()

            def quantize(command, **_):
                Path(command[4]).touch()
                return SimpleNamespace(returncode=0)

            def targets(writable):
                with (
                    mock.patch.object(os, "access", lambda *_: writable),
                    mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(root / "cache")}),
                    mock.patch.object(peers_engines.subprocess, "run", quantize),
                    mock.patch.object(peers_engines, "say", lambda _: None),
                ):
                    return [peers_engines.requantized("python", model, "q8_0") for model in models]

            self.assertEqual([target.parent for target in targets(True)], [model.parent for model in models])
            a, b = targets(False)
            self.assertNotEqual(a, b)
            self.assertTrue(all(target.is_relative_to(root / "cache") and target.is_file() for target in (a, b)))


if __name__ == "__main__":
    unittest.main()
