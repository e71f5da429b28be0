"""Which system calls a program may make, with their numbers on x86_64 and aarch64; kernel headers may be absent.

Anything that is not named here is refused. Rows are `name x86_64 aarch64`, "-" where the architecture lacks the call.
CONDITIONAL calls are allowed for some arguments only; seccomp.py says which.
"""

from __future__ import annotations

ALLOWED = """
    read 0 63, write 1 64, close 3 57, close_range 436 436, lseek 8 62, pread64 17 67, pwrite64 18 68,
    readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70, preadv2 327 286, pwritev2 328 287, dup 32 23,
    dup2 33 -, dup3 292 24, fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83, sync_file_range 277 84,
    pipe 22 -, pipe2 293 59, sendfile 40 71, splice 275 76, tee 276 77, copy_file_range 326 285, select 23 -,
    pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
    epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, signalfd 282 -,
    signalfd4 289 74, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
    open 2 -, openat 257 56, openat2 437 437, creat 85 -, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79,
    statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78,
    getcwd 79 17, chdir 80 49, fchdir 81 50, getdents 78 -, getdents64 217 61, mkdir 83 -, mkdirat 258 34,
    rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -,
    linkat 265 37, symlink 88 -, symlinkat 266 36, truncate 76 45, ftruncate 77 46, fallocate 285 47,
    fadvise64 221 223, fchmod 91 52, umask 95 166, statfs 137 43, fstatfs 138 44, getxattr 191 8,
    lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
    mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214, madvise 28 233, msync 26 227,
    mincore 27 232, membarrier 324 283, mlock 149 228, munlock 150 229, mlock2 325 284, munlockall 152 231,
    exit 60 93, exit_group 231 94, futex 202 98, set_robust_list 273 99, get_robust_list 274 100,
    set_tid_address 218 96, rseq 334 293, sched_yield 24 124, gettid 186 178, restart_syscall 219 128,
    arch_prctl 158 -, wait4 61 260, waitid 247 95, map_shadow_stack 453 453,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
    rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -, alarm 37 -,
    gettimeofday 96 169, time 201 -, times 100 153, clock_gettime 228 113, clock_getres 229 114,
    clock_nanosleep 230 115, nanosleep 35 101, getitimer 36 102, setitimer 38 103, timer_create 222 107,
    timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
    getpid 39 172, getppid 110 173, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174,
    geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158,
    capget 125 90, uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163, getpriority 140 141,
    getcpu 309 168, getrandom 318 278, sched_getaffinity 204 123, sched_getparam 143 121,
    sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
    recvfrom 45 207, recvmsg 47 212, shutdown 48 210, getsockopt 55 209,
    setsockopt 54 208, getsockname 51 204, getpeername 52 205,
"""

# By path, and not among Landlock's rights: allowed only where the program sees a root of its own.
METADATA = """
    chmod 90 -, fchmodat 268 53, fchmodat2 452 452, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88,
"""

CONDITIONAL = """
    clone 56 220, clone3 435 435, kill 62 129, tgkill 234 131, ioctl 16 29, prctl 157 167, prlimit64 302 261,
    socketpair 53 199, sendto 44 206,
"""

ARCHITECTURES = {"x86_64": 0, "aarch64": 1}  # column of each machine name


def numbers(table: str, machine: str) -> dict[str, int]:
    """Name to number of the table's calls on a machine of ARCHITECTURES."""
    rows = (row.split() for row in table.replace("\n", " ").split(",") if row.strip())
    column = ARCHITECTURES[machine] + 1
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
