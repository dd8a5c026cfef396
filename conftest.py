"""For every test: at each new connection torch looks up the name of 127.0.0.1, twice.

Where names cannot be looked up that takes 5 s a time, longer than deadlines in tests; a second is enough to say so.
"""

import os

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
