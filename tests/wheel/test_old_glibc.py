"""What a wheel has in place of newer functions of glibc, where they are not; elsewhere the waits are glibc's own."""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def test_older_words_do_the_same(tmp_path: Path) -> None:
    program = tmp_path / "old_glibc_test"
    options = [
        "-O1",
        "-fno-builtin",
        "-fvisibility=hidden",
        "-D_GNU_SOURCE",
        "-include",
        "dlfcn.h",
        "-Ddlsym(handle,name)=NULL",
    ]
    subprocess.run(["gcc", *options, HERE / "old_glibc_test.c", "-o", program, "-pthread", "-lm"], check=True)
    assert subprocess.run([program], timeout=60).returncode == 0
