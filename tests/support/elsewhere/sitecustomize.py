"""Makes Python lack what only Linux has, in a process and its children: found on PYTHONPATH, imported at the start.

Not a test of another system: only the absence of calls, files, a compiler and Triton is simulated.
"""

import builtins
import importlib.abc
import io
import mmap
import os
import select
import shutil
import signal
import socket
import sys

ONLY_LINUX = {
    os: ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fallocate", "posix_fadvise", "O_DIRECT",
         "copy_file_range", "eventfd", "pidfd_open", "sendfile", "splice", "preadv", "pwritev", "waitid", "O_PATH",
         "O_TMPFILE", "getrandom", "sched_getscheduler", "setresuid", "unshare", "fallocate"),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK", "MADV_POPULATE_WRITE", "MADV_REMOVE", "MAP_POPULATE",
           "MAP_NORESERVE", "MAP_STACK"),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo", "SIGPOLL", "SIGRTMIN", "SIGRTMAX", "SIGSTKFLT"),
    socket: ("TCP_USER_TIMEOUT", "TCP_INFO", "TCP_QUICKACK", "TCP_CORK", "TCP_KEEPIDLE", "SO_PEERCRED", "SO_REUSEPORT",
             "SOCK_CLOEXEC", "SOCK_NONBLOCK", "MSG_NOSIGNAL", "AF_NETLINK", "AF_VSOCK"),
}  # fmt: skip
for module, names in ONLY_LINUX.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

COMPILERS = {"g++", "gcc", "cc", "c++", "clang", "clang++"}
which, opened = shutil.which, io.open


def which_but_no_compiler(name, *more, **named):
    return None if os.path.basename(name) in COMPILERS else which(name, *more, **named)


def open_elsewhere(file, *more, **named):
    """Open a file as on a system without /proc and /sys. PyTorch, which is built for Linux, reads neither this way."""
    if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", file)
    return opened(file, *more, **named)


shutil.which = which_but_no_compiler
builtins.open = io.open = open_elsewhere


# The last two are missing on Windows.
MISSING = ("triton", "flashinfer", "uvloop", "fcntl", "resource")
for name in MISSING:
    sys.modules.pop(name, None)


class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return


sys.meta_path.insert(0, Missing())
