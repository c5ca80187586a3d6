"""An interpreter for vLLM servers on the CPU, `python forked_engine.py -m MODULE ARGUMENTS`: the server forks its
engine.

vLLM starts it as a new interpreter there, which imports vLLM once more: half of the server's start.
"""

import multiprocessing
import runpy
import sys

from vllm.utils import system_utils

system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
