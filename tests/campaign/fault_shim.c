/* Counts the file-system calls of a process below one folder, and injects a fault at the n-th of them: an error number, a signal,
   or half a write followed by either. Loaded with LD_PRELOAD, so that it reaches the writes of C++, Rust, HDF5 and numpy too.
   Nothing happens before arm_faults() is called (by ctypes, in the child that is to suffer). */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN_R = 1, READ = 2, STAT = 4, OPEN_W = 8, WRITE = 16, RENAME = 32, SYNC = 64, MKDIR = 128, REMOVE = 256, LOCK = 512 };

static char root[4096];
static long target, count;
static int armed, fault, mask, sticky, half, fired, trace_fd = -1;

/* fault: an error number, or minus a signal. target 0: only trace. */
void arm_faults(const char *folder, long n, int what, int which, int stays, int halved, int trace) {
    strncpy(root, folder, sizeof root - 1);
    target = n, fault = what, mask = which, sticky = stays, half = halved, trace_fd = trace;
    count = fired = 0;
    armed = 1;
}
int faults_fired(void) { return fired; }

static int below(int dir, const char *path, char *full) {
    char at[64];
    size_t n = strlen(root);
    ssize_t k;
    full[0] = 0;
    if (path && path[0] == '/') {
        strncpy(full, path, 8191);
    } else {
        if (path && dir == AT_FDCWD) strcpy(at, "/proc/self/cwd");
        else snprintf(at, sizeof at, "/proc/self/fd/%d", dir);
        k = syscall(SYS_readlinkat, AT_FDCWD, at, full, 4000);
        if (k < 0) return 0;
        full[k] = 0;
        if (path && path[0]) { strcat(full, "/"); strncat(full, path, 4000); }
    }
    return strncmp(full, root, n) == 0 && (full[n] == '/' || !full[n]);
}

/* 0: go on. 1: half the write, then the fault. Otherwise the error number to return. */
static int strike(const char *name, int kind, int dir, const char *path) {
    char full[8192], line[8300];
    int saved = errno, hit;
    if (!armed || !below(dir, path, full)) { errno = saved; return 0; }
    long now = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (trace_fd >= 0) {
        int n = snprintf(line, sizeof line, "%d %s %s\n", kind, name, full + strlen(root));
        syscall(SYS_write, trace_fd, line, n);
    }
    errno = saved;
    hit = target && now >= target && (kind & mask) && (!fired || sticky);
    if (!hit) return 0;
    if (kind == WRITE && half && !fired) { fired = 1; return -1; }
    fired = 1;
    if (fault > 0) return fault;
    syscall(SYS_kill, getpid(), -fault); /* a stopped process goes on from here */
    return 0;
}
static void strike_now(void) { if (fault < 0) syscall(SYS_kill, getpid(), -fault); else sticky = 1; }

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)
#define FAIL(what, value) do { int failed_ = (what); if (failed_ > 0) { errno = failed_; return value; } } while (0)

static int open_kind(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? OPEN_W : OPEN_R; }
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list a; va_start(a, flags); int mode = va_arg(a, int); va_end(a); \
    REAL(int, #name, const char *, int, ...); FAIL(strike("open", open_kind(flags), AT_FDCWD, path), -1); return real(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define OPENAT(name) int name(int dir, const char *path, int flags, ...) { \
    va_list a; va_start(a, flags); int mode = va_arg(a, int); va_end(a); \
    REAL(int, #name, int, const char *, int, ...); FAIL(strike("openat", open_kind(flags), dir, path), -1); return real(dir, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)
#define FOPEN(name) FILE *name(const char *path, const char *mode) { \
    REAL(FILE *, #name, const char *, const char *); \
    FAIL(strike("fopen", strpbrk(mode, "wa+") ? OPEN_W : OPEN_R, AT_FDCWD, path), NULL); return real(path, mode); }
FOPEN(fopen)
FOPEN(fopen64)
DIR *opendir(const char *path) { REAL(DIR *, "opendir", const char *); FAIL(strike("opendir", OPEN_R, AT_FDCWD, path), NULL); return real(path); }

#define WRITES(name, call_args, whole, halved, ...) ssize_t name(__VA_ARGS__) { \
    REAL(ssize_t, #name, __VA_ARGS__); int e = strike(#name, WRITE, fd, NULL); FAIL(e, -1); \
    if (e < 0) { ssize_t k = halved; strike_now(); return k; } return whole; }
WRITES(write, (), real(fd, b, n), real(fd, b, (n + 1) / 2), int fd, const void *b, size_t n)
WRITES(pwrite, (), real(fd, b, n, o), real(fd, b, (n + 1) / 2, o), int fd, const void *b, size_t n, off_t o)
WRITES(pwrite64, (), real(fd, b, n, o), real(fd, b, (n + 1) / 2, o), int fd, const void *b, size_t n, off_t o)
WRITES(writev, (), real(fd, v, n), real(fd, v, 1), int fd, const struct iovec *v, int n)
size_t fwrite(const void *b, size_t size, size_t n, FILE *f) {
    REAL(size_t, "fwrite", const void *, size_t, size_t, FILE *);
    int e = armed ? strike("fwrite", WRITE, fileno(f), NULL) : 0;
    FAIL(e, 0);
    if (e < 0) { /* short only with an error: after a signal that it survives, the C library writes the rest */
        size_t k = real(b, size, (n + 1) / 2, f);
        fflush(f);
        strike_now();
        return fault > 0 ? k : k + real((const char *)b + k * size, size, n - k, f);
    }
    return real(b, size, n, f);
}
#define READS(name, call, ...) ssize_t name(__VA_ARGS__) { REAL(ssize_t, #name, __VA_ARGS__); FAIL(strike(#name, READ, fd, NULL), -1); return call; }
READS(read, real(fd, b, n), int fd, void *b, size_t n)
READS(pread, real(fd, b, n, o), int fd, void *b, size_t n, off_t o)
READS(pread64, real(fd, b, n, o), int fd, void *b, size_t n, off_t o)

#define CALL(name, kind, dir, path, call, ...) int name(__VA_ARGS__) { REAL(int, #name, __VA_ARGS__); FAIL(strike(#name, kind, dir, path), -1); return call; }
CALL(stat, STAT, AT_FDCWD, p, real(p, s), const char *p, struct stat *s)
CALL(stat64, STAT, AT_FDCWD, p, real(p, s), const char *p, struct stat64 *s)
CALL(lstat, STAT, AT_FDCWD, p, real(p, s), const char *p, struct stat *s)
CALL(lstat64, STAT, AT_FDCWD, p, real(p, s), const char *p, struct stat64 *s)
CALL(rename, RENAME, AT_FDCWD, b, real(a, b), const char *a, const char *b)
CALL(renameat, RENAME, e, b, real(d, a, e, b), int d, const char *a, int e, const char *b)
CALL(fsync, SYNC, fd, NULL, real(fd), int fd)
CALL(fdatasync, SYNC, fd, NULL, real(fd), int fd)
CALL(ftruncate, WRITE, fd, NULL, real(fd, n), int fd, off_t n)
CALL(ftruncate64, WRITE, fd, NULL, real(fd, n), int fd, off_t n)
CALL(mkdir, MKDIR, AT_FDCWD, p, real(p, m), const char *p, mode_t m)
CALL(mkdirat, MKDIR, d, p, real(d, p, m), int d, const char *p, mode_t m)
CALL(unlink, REMOVE, AT_FDCWD, p, real(p), const char *p)
CALL(unlinkat, REMOVE, d, p, real(d, p, f), int d, const char *p, int f)
CALL(remove, REMOVE, AT_FDCWD, p, real(p), const char *p)
CALL(rmdir, REMOVE, AT_FDCWD, p, real(p), const char *p)
CALL(flock, LOCK, fd, NULL, real(fd, op), int fd, int op)
