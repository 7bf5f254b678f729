# SPDX-License-Identifier: Apache-2.0
"""The cage: what a process gives up before it runs anything that a model had a say in. Linux, standard library only.

Layers, from the inside out. The first needs nothing, the next two no privilege and no package:

* **rlimits**: processor seconds, address space, no files written, few descriptors, no processes, no core; a session of
  its own, death with the parent, closed descriptors, no capabilities.
* **seccomp**: a list of about 80 system calls that are allowed, all others fail with EPERM: no sockets, processes,
  threads, programs, signals, tracing, mounts, io_uring, shared memory, nothing that removes or renames.
* **Landlock** (Linux 5.13): of the file system only libraries can be read, nothing written; no other process touched.
* **bubblewrap** and **cgroups**, around all of them: see :mod:`verl_ext.sandbox.shell`.

A process that has entered proves it to itself (:meth:`Cage.enter`): what should fail is tried, and if it works the
process ends without having run anything.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import math
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEVELS = ("auto", "required", "rlimits")
"""``required``: rlimits, seccomp and Landlock. ``auto``: also bubblewrap and cgroups where the machine has them.
``rlimits``: seccomp and Landlock only where the machine has them, for models that are trusted, in a container."""

STACK = 96 << 20
"""Bytes of stack of a call: programs that recurse through C functions, as cached ones do, ask for such threads."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


class CageError(RuntimeError):
    """A layer that was asked for is not there or did not close; the message names it and the way out."""


def _check(result: int, what: str) -> int:
    """What a call into the kernel gave, unless it failed."""
    if result < 0:
        raise CageError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


@dataclass(frozen=True)
class Limits:
    """What calls may use.

    Attributes:
        workers: calls that run at a time; further ones wait, and their clocks with them. 0: twice the processors,
            at least 8. A slow call holds one place only.
        memory_mb: MiB of address space that one call may add.
        input_kb, output_kb: KiB of arguments and of a value, as JSON.
        patience: a call's limit is in seconds of processor time, so that a busy machine fails nobody. On the clock it
            may take so many times longer, without the time that it waits for a processor.
    """

    workers: int = 0
    memory_mb: int = 2048
    input_kb: int = 4096
    output_kb: int = 4096
    patience: float = 5.0

    def __post_init__(self) -> None:
        if self.workers < 0 or min(self.memory_mb, self.input_kb, self.output_kb) < 1 or not self.patience >= 1:
            raise ValueError(f"{self}: workers must be at least 0, the sizes at least 1 and patience at least 1")


# --- seccomp ------------------------------------------------------------------------------------------------------

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Allowed calls with their numbers on x86_64 and aarch64 ("-": not there), from Linux's unistd_64.h and unistd.h.
_CALLS = """
read=0/63 write=1/64 readv=19/65 writev=20/66 pread64=17/67 pwrite64=18/68 lseek=8/62 close=3/57 close_range=436/436
open=2/- openat=257/56
dup=32/23 dup2=33/- dup3=292/24 pipe=22/- pipe2=293/59
stat=4/- fstat=5/80 lstat=6/- newfstatat=262/79 statx=332/291 access=21/- faccessat=269/48
faccessat2=439/439 readlink=89/- readlinkat=267/78 getcwd=79/17 getdents=78/- getdents64=217/61 fadvise64=221/223
mmap=9/222 mprotect=10/226 munmap=11/215 mremap=25/216 madvise=28/233 mincore=27/232 msync=26/227 brk=12/214
rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 sigaltstack=131/132
getitimer=36/102 setitimer=38/103 alarm=37/-
poll=7/- ppoll=271/73 select=23/- pselect6=270/72 sched_yield=24/124 nanosleep=35/101 clock_nanosleep=230/115
restart_syscall=219/128 clock_gettime=228/113 clock_getres=229/114 gettimeofday=96/169 time=201/- times=100/153
getrusage=98/165 getrlimit=97/163 sysinfo=99/179 uname=63/160 getcpu=309/168 getrandom=318/278
getpid=39/172 getppid=110/173 gettid=186/178 getuid=102/174 geteuid=107/175 getgid=104/176 getegid=108/177
getgroups=115/158 getresuid=118/148 getresgid=120/150 sched_getaffinity=204/123 get_mempolicy=239/236
membarrier=324/283 futex=202/98 set_robust_list=273/99 get_robust_list=274/100 set_tid_address=218/96 rseq=334/293
arch_prctl=158/- exit=60/93 exit_group=231/94 umask=95/166
"""
# What a GPU's driver and its compilers need besides, where there is a scratch folder.
_DEVICE_CALLS = """
fork=57/- vfork=58/- execve=59/221 wait4=61/260 waitid=247/95 eventfd2=290/19
memfd_create=319/279 ftruncate=77/46 statfs=137/43 fstatfs=138/44 flock=73/32 mlock=149/228 munlock=150/229
mbind=237/235 mkdir=83/- mkdirat=258/34 rmdir=84/- unlink=87/- unlinkat=263/35 rename=82/-
renameat=264/38 renameat2=316/276
"""
# What whole programs need besides those: connections, events, files of their own.
_PROGRAM_CALLS = """
connect=42/203 recvfrom=45/207 recvmsg=47/212 recvmmsg=299/243 shutdown=48/210 getsockname=51/204 getpeername=52/205
setsockopt=54/208 getsockopt=55/209 sendfile=40/71 splice=275/76 tee=276/77 copy_file_range=326/285
epoll_create=213/- epoll_create1=291/20 epoll_ctl=233/21 epoll_wait=232/- epoll_pwait=281/22 epoll_pwait2=441/441
timerfd_create=283/85 timerfd_settime=286/86 timerfd_gettime=287/87 signalfd4=289/74 eventfd=284/- pause=34/-
rt_sigpending=127/136 rt_sigsuspend=130/133 rt_sigtimedwait=128/137 preadv=295/69 pwritev=296/70 preadv2=327/286
pwritev2=328/287 creat=85/- truncate=76/45 fsync=74/82 fdatasync=75/83 link=86/- linkat=265/37 symlink=88/-
symlinkat=266/36 chdir=80/49 fchdir=81/50 getpgid=121/155 getpgrp=111/- getsid=124/156 setrlimit=160/164 prctl=157/167
getpriority=140/141 sched_getparam=143/121 sched_getscheduler=145/120 sched_get_priority_max=146/125
sched_get_priority_min=147/126 capget=125/90
"""
# Rights and times of files, which Landlock leaves to a file's owner: they seem to work and change nothing, so that
# archives can be unpacked and files copied.
_PRETENDED = """
chmod=90/- fchmod=91/52 fchmodat=268/53 fchmodat2=452/452 utimensat=280/88 utime=132/- utimes=235/- futimesat=261/-
"""
# Where Landlock keeps signals inside (version 6).
_SIGNAL_CALLS = (
    "kill=62/129 tkill=200/130 tgkill=234/131 rt_sigqueueinfo=129/138 pidfd_open=434/434 pidfd_send_signal=424/424"
)
_WAITING_CALLS = "bind=49/200 listen=50/201"
MORE = {"": "", "device": _DEVICE_CALLS + _WAITING_CALLS, "program": _DEVICE_CALLS + _PROGRAM_CALLS}
_OPENS, _WRITING = {"open": 1, "openat": 2}, 0o1103  # where the flags are; O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
_FCNTL, _FCNTL_COMMANDS = (72, 25), (1, 2, 3, 1030)  # F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
# F_DUPFD, F_SETFL, locks, sizes of pipes; not F_SETOWN, which sends signals.
_MORE_FCNTL = (0, 4, 5, 6, 7, 36, 37, 38, 1031, 1032)
_PRLIMIT, _CLONE, _CLONE3, _IOCTL = (302, 261), (56, 220), (435, 435), (16, 29)
_SOCKET, _SOCKETPAIR, _SENDTO, _SENDMSG, _SENDMMSG = (41, 198), (53, 199), (44, 206), (46, 211), (307, 269)
_STREAMS = (1, 1 | 0o4000, 1 | 0o2000000, 1 | 0o2004000)  # SOCK_STREAM, with SOCK_NONBLOCK, SOCK_CLOEXEC, both
# A GPU's driver asks for a service at a socket of Unix, finds none, and waits at another for who never comes; without
# these it does not start. It gets sockets that nothing can be read from or written to: connecting finds nobody, nobody
# is let in, and Landlock forbids to make their files.
_PACKETS = (5, 5 | 0o2000000)  # SOCK_SEQPACKET, with SOCK_CLOEXEC
_SETSOCKOPT, _CONNECT = (54, 208), (42, 203)
_NAMESPACES, _FAST_OPEN = 0x7E020000, 0x20000000  # CLONE_NEW*; MSG_FASTOPEN, which connects past Landlock
_IOCTLS = (0x8901, 0x8902, 0x5412, 0x541C)  # FIOSETOWN, SIOCSPGRP (signals to others); TIOCSTI, TIOCLINUX (typing)

# Opcodes of classic BPF: load a word of the call's description, compare, test bits, return.
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def allowed_calls(machine: str, more: str = "") -> dict[str, int]:
    """System calls that are allowed whatever their arguments, by name; for `machine` ``x86_64`` or ``aarch64``, and
    what `more` of `MORE` needs besides.
    """
    signals = _SIGNAL_CALLS if more == "program" and landlock_version() >= 6 else ""
    return _numbers(_CALLS + MORE[more] + signals, machine)


def _numbers(calls: str, machine: str) -> dict[str, int]:
    column = list(_AUDIT_ARCH).index(machine)
    pairs = [entry.partition("=")[::2] for entry in calls.split()]
    return {name: int(found) for name, numbers in pairs if (found := numbers.split("/")[column]) != "-"}


def seccomp_program(machine: str, more: str = "") -> bytes:
    """The filter for such a machine (see `allowed_calls`) as BPF instructions, 8 bytes each. Where there is `more`,
    processes may besides be made, in the same namespaces; by a program TCP sockets and pairs of streams, too.
    """

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def when(value: int, *then: bytes) -> list[bytes]:
        """Go through `then` if that is what was loaded, else skip it."""
        return [instruction(_EQUAL, value, 0, len(then)), *then]

    def argument(index: int, half: int = 0) -> bytes:
        # A description begins: number (4 bytes), architecture (4), instruction pointer (8), six arguments (8 each).
        return instruction(_LOAD, 16 + 8 * index + 4 * half)

    column = list(_AUDIT_ARCH).index(machine)
    allow, kill = instruction(_RETURN, _ALLOW), instruction(_RETURN, _KILL)
    failures = (errno.EPERM, errno.ENOSYS, errno.ENOENT, 0)
    deny, unknown, absent, pretend = (instruction(_RETURN, _ERROR | failure) for failure in failures)
    program = [instruction(_LOAD, 4), instruction(_EQUAL, _AUDIT_ARCH[machine], 1, 0), kill]  # 32-bit calls differ
    program.append(instruction(_LOAD, 0))

    def without(index: int, bits: int) -> list[bytes]:
        return [argument(index), instruction(_BITS, bits, 0, 1), deny, allow]

    if more:
        program += when(_CLONE3[column], unknown)  # glibc takes the older call, whose flags can be read
        program += when(_CLONE[column], *without(0, _NAMESPACES))
        program += when(_IOCTL[column], argument(1), *[step for one in _IOCTLS for step in when(one, deny)], allow)
    if more == "device":
        packets = [argument(1), *[step for kind in _PACKETS for step in when(kind, allow)], deny]
        program += when(_SOCKET[column], argument(0), *when(1, *packets), deny)
        program += when(_CONNECT[column], absent)
        program += when(_SETSOCKOPT[column], pretend)
    if more == "program":
        for call, index in ((_SENDTO, 3), (_SENDMSG, 2), (_SENDMMSG, 3)):
            program += when(call[column], *without(index, _FAST_OPEN))
        # The protocol is TCP's or the default, which is: Landlock does not see those of others. From pairs that are no
        # streams any socket of Unix could be sent to.
        protocol = [argument(2), *when(0, allow), *when(6, allow), deny]
        streams = [argument(1), *[step for kind in _STREAMS for step in when(kind, *protocol)], deny]
        internet = [instruction(_EQUAL, 2, 1, 0), instruction(_EQUAL, 10, 0, len(streams)), *streams]
        program += when(_SOCKET[column], argument(0), *internet, deny)
        program += when(_SOCKETPAIR[column], *streams)
        for number in _numbers(_PRETENDED, machine).values():
            program += when(number, pretend)
    for name, number in sorted(allowed_calls(machine, more).items(), key=lambda item: item[1]):
        program += when(number, *(without(_OPENS[name], _WRITING) if name in _OPENS and not more else [allow]))
    fcntl = _FCNTL_COMMANDS + _MORE_FCNTL * bool(more)
    commands = [step for command in fcntl for step in when(command, allow)]
    program += when(_FCNTL[column], argument(1), *commands, deny)
    # prlimit with no new limit: both halves of the pointer are 0. A program may change its own limits: process 0.
    if more == "program":
        program += when(_PRLIMIT[column], argument(0), *when(0, allow), deny)
    program += when(_PRLIMIT[column], argument(2), *when(0, argument(2, 1), *when(0, allow)), deny)
    return b"".join([*program, deny])


_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38


def has_seccomp() -> bool:
    """Whether this kernel takes filters, on a machine whose call numbers are known here."""
    # A filter at address 0 is refused by a kernel that has filters, and unknown to one that has not.
    _libc.prctl(_PR_SET_SECCOMP, 2, None, 0, 0)
    return platform.machine() in _AUDIT_ARCH and ctypes.get_errno() in (errno.EFAULT, errno.EACCES)


# --- Landlock -----------------------------------------------------------------------------------------------------

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on all architectures
RUN, WRITE_FILE, READ_FILE, READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
DEVICE = READ_FILE | WRITE_FILE | 1 << 15  # the last: ioctl
CUT = 1 << 14
SCRATCH = WRITE_FILE | READ_FILE | READ_DIR | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | CUT
"""Remove folders and files, make folders and files, move and cut files."""
_OF_FILES = RUN | DEVICE | CUT
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""How many rights on files a version knows, from 5 on 16. All are taken away; those not named are given to nobody."""


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 without it."""
    return max(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)), 0)


def landlock_rules(readable: Iterable[str], more: Iterable[tuple[str, int]] = (), port: int = 0) -> int:
    """A descriptor of rules: `readable` files and folders can be read, nothing else, and nothing written or run.

    Args:
        readable: paths.
        more: further paths with other rights.
        port: TCP port, of any host, that can be connected to; 0: none.

    Raises:
        CageError: the kernel has no Landlock, or refused a rule.
    """
    version = landlock_version()
    # Rights on files; TCP, from version 4 on; abstract sockets and signals, from version 6 on.
    known = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    rights = struct.pack("=QQQ", known, 3, 3)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _libc.syscall(_LANDLOCK_CREATE, rights, ctypes.c_size_t(size), ctypes.c_uint32(0))
    _check(ruleset, "landlock_create_ruleset")
    for path, allowed in [*((path, READ_FILE | READ_DIR) for path in readable), *more]:
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # a library folder that this machine has not
            continue
        rule = struct.pack("=Qi", allowed & known & (-1 if os.path.isdir(path) else _OF_FILES), parent)
        added = _libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, ctypes.c_uint32(0))
        _check(added, f"landlock_add_rule {path}")
        os.close(parent)
    if port:
        added = _libc.syscall(_LANDLOCK_ADD, ruleset, 2, struct.pack("=QQ", 2, port), ctypes.c_uint32(0))
        _check(added, f"landlock_add_rule port {port}")
    return ruleset


def library_paths() -> list[str]:
    """What a Python process may need to read after its start: the libraries of the system and of this Python."""
    paths = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    paths += ["/dev/null", "/dev/zero", "/dev/urandom", os.path.join(sys.base_prefix, "lib")]
    paths += [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if path))


def device_paths(scratch: str) -> list[tuple[str, int]]:
    """What a GPU's driver and its compilers need besides, with rights: devices, programs, one folder to write in, and
    the names of this process's threads, without which the driver does not start.
    """
    devices = [*glob.glob("/dev/nvidia*"), *glob.glob("/dev/nvidia-caps/*")]
    programs = ["/usr", "/bin", "/lib", "/lib64", sysconfig.get_paths()["platlib"]]
    return [
        *((path, DEVICE) for path in [*devices, "/dev/null"] if not os.path.isdir(path)),
        *((os.path.realpath(path), RUN | READ_FILE | READ_DIR) for path in programs),
        *((path, READ_FILE | READ_DIR) for path in ("/proc", "/sys", "/etc/OpenCL", sysconfig.get_paths()["include"])),
        ("/proc/self/task", WRITE_FILE | CUT),
        (scratch, SCRATCH),
    ]


# --- the whole ----------------------------------------------------------------------------------------------------


def drop_capabilities() -> None:
    """Give up all capabilities of this process, root's included."""
    _check(_libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "capset")


def give_up_privileges() -> None:
    """Give up all capabilities, those that a program could bring included."""
    drop_capabilities()
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0), "no_new_privs")


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, None, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that none of them can leave."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, None, 0, 0)


class Cage:
    """The cage of calls, prepared once by the process that forks them.

    Args:
        level: one of `LEVELS`.
        limits: of a call.
        scratch: a folder, for calls that use a GPU and compile for it: they may write there, and use its devices,
            threads and the programs of the system. Still no network, no other files, no signals to others.

    Raises:
        CageError: `level` asks for Landlock, and the kernel refused its rules.
    """

    def __init__(self, level: str, limits: Limits, scratch: str = "") -> None:
        self.level, self.limits, self.scratch = level, limits, scratch
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._rules: int | None = None
        self._program = b""
        if level != "rlimits" or landlock_version():
            self._rules = landlock_rules(library_paths(), device_paths(scratch) if scratch else ())
        if level != "rlimits" or has_seccomp():
            self._program = seccomp_program(platform.machine(), "device" if scratch else "")

    def enter(self, result: int, cpu_s: float, more: Sequence[int] = ()) -> None:
        """Shut this process in, for ever. It must have been forked for one call, and have one thread.

        Args:
            result: the descriptor that stays open, beside those of the null device at 0, 1 and 2.
            cpu_s: seconds of processor time, rounded up, one more added: the forking process ends it in time.
            more: further descriptors that stay open.

        Raises:
            CageError: a layer did not close. Nothing may be run.
        """
        os.setsid()
        die_with_parent()
        rules = self._rules
        if rules is not None and self.scratch:  # its own: they name this process
            rules = landlock_rules(library_paths(), device_paths(self.scratch))
        os.dup2(1, 2)  # the zygote's last words are no call's, and a file: limited to nothing, writing to it would fail
        first = 3
        for kept in sorted({result, *more, result if rules is None else rules}):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, 1 << 20)
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
        memory = pages * os.sysconf("SC_PAGESIZE") + (self.limits.memory_mb << 20)
        limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, math.ceil(cpu_s) + 1)]
        if self.scratch:  # a driver reserves address space without end, and has threads and files of its own
            limits += [(resource.RLIMIT_FSIZE, 256 << 20), (resource.RLIMIT_DATA, memory + (16 << 30))]
            limits += [(resource.RLIMIT_NOFILE, self._files)]
        else:
            limits += [(resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 64)]
            limits += [(resource.RLIMIT_NPROC, 0), (resource.RLIMIT_AS, memory), (resource.RLIMIT_STACK, STACK)]
        for kind, value in limits:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        give_up_privileges()
        close(rules, self._program)


def close(rules: int | None, program: bytes) -> None:
    """Put rules of Landlock and a seccomp filter, if any, into force for this process, which has given up privileges.

    Raises CageError: what they forbid, a look at the root folder and a socket of Unix, works or could not be forbidden.
    """
    if rules is not None:
        _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, ctypes.c_uint32(0)), "landlock_restrict_self")
        os.close(rules)
    if program:
        instructions = ctypes.create_string_buffer(program)
        packed = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
        _check(_libc.prctl(_PR_SET_SECCOMP, 2, packed, 0, 0), "seccomp")
    try:
        os.close(os.open("/", os.O_RDONLY))
    except PermissionError:
        pass
    else:
        if rules is not None:
            raise CageError("Landlock is in force and the root folder can be read all the same")
    if program and (_libc.socket(1, 1, 0) >= 0 or ctypes.get_errno() != errno.EPERM):
        raise CageError("the seccomp filter is in force and a socket can be made all the same")
