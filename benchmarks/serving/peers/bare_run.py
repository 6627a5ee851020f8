"""Print the CPU time of `session.run` alone, in microseconds for each run.

python bare_run.py MODEL.onnx SHAPE RUNS
"""

import sys
import time

import numpy as np
import onnxruntime as ort

options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.add_session_config_entry("session.intra_op.allow_spinning", "0")
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
feed = {"x": np.full([int(size) for size in sys.argv[2].split(",")], 0.5, np.float32)}
runs = int(sys.argv[3])
for _ in range(runs // 10):
    session.run(None, feed)
begun = time.process_time()
for _ in range(runs):
    session.run(None, feed)
print(1e6 * (time.process_time() - begun) / runs)
