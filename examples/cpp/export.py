"""scikit-learn's 1,797 handwritten digits as a plain file: for each one 64 pixels and its label, a byte each.

export.py FILE
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
rows = np.concatenate([digits.data, digits.target[:, None]], axis=1).astype(np.uint8)
np.random.default_rng(0).permutation(rows).tofile(sys.argv[1])
