/* Put before the C library (LD_PRELOAD): counts a process's changes to the files below some directory, and at the Nth of them
 * kills the process, or makes the call fail.
 *
 *   KCACHE_FAULT_UNDER   directory; calls on paths and descriptors elsewhere are not counted
 *   KCACHE_FAULT_COUNTER file of 8 bytes, mapped by every process of the run: the number of calls so far
 *   KCACHE_FAULT_AT      which call, from 1 on; 0 counts only
 *   KCACHE_FAULT_DO      kill   SIGKILL before the call
 *                        torn   half of a write is done, then SIGKILL; other calls are done, then SIGKILL
 *                        late   the call is done and says EIO, as a rename over NFS whose answer was lost
 *                        shown  the call says EIO, and is done by somebody else 30 ms later
 *                        gone   the directory KCACHE_FAULT_GONE is moved away (to its name with .gone) before the call
 *                        N      the call fails with this errno; with KCACHE_FAULT_ON so does every later one
 *   KCACHE_FAULT_ONLY    name of a call, such as rename: only these are counted
 *
 * Only calls that change something count: a kill between two of them leaves the same files as a kill just before the later one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { NOTHING, DENY, TORN, LATE, SHOWN };

static const char *under, *only, *action, *gone;
static uint64_t *counter, at;
static int on;

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("KCACHE_FAULT_COUNTER"), *number = getenv("KCACHE_FAULT_AT");
  under = getenv("KCACHE_FAULT_UNDER");
  only = getenv("KCACHE_FAULT_ONLY");
  gone = getenv("KCACHE_FAULT_GONE");
  action = getenv("KCACHE_FAULT_DO");
  on = getenv("KCACHE_FAULT_ON") != NULL;
  at = number ? strtoull(number, NULL, 10) : 0;
  if (!file || !under) return;
  int descriptor = syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) abort();
  counter = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  syscall(SYS_close, descriptor);
  if (counter == MAP_FAILED) abort();
}

static void die(void) {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

static int below(int directory, const char *path) {
  char link[64], base[PATH_MAX];
  size_t length = strlen(under);
  if (path && path[0] == '/') return strncmp(path, under, length) == 0;
  if (directory == AT_FDCWD) return getcwd(base, sizeof base) && strncmp(base, under, length) == 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
  ssize_t found = readlink(link, base, sizeof base - 1);
  if (found < 0) return 0;
  base[found] = 0;
  return strncmp(base, under, length) == 0;
}

/* What is to become of this call. */
static int fate(const char *name, int directory, const char *path) {
  if (!counter || !below(directory, path) || (only && strcmp(only, name))) return NOTHING;
  uint64_t now = __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST);
  if (!at || now < at || (now > at && !on)) return NOTHING;
  if (!strcmp(action, "kill")) die();
  if (!strcmp(action, "gone")) {
    char away[PATH_MAX];
    snprintf(away, sizeof away, "%s.gone", gone);
    syscall(SYS_renameat, AT_FDCWD, gone, AT_FDCWD, away);
    return NOTHING;
  }
  if (!strcmp(action, "torn")) return TORN;
  if (!strcmp(action, "late")) return LATE;
  if (!strcmp(action, "shown")) return SHOWN;
  errno = atoi(action);
  return DENY;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* A call that returns 0 or -1. */
#define CHANGE(name, kind, directory, path, parameters, arguments)                                                              \
  int name parameters {                                                                                                         \
    int result, what = fate(kind, directory, path);                                                                             \
    if (what == DENY) return -1;                                                                                                \
    if (what == SHOWN) {                                                                                                        \
      if (fork() == 0) {                                                                                                        \
        usleep(30000);                                                                                                          \
        REAL(name) arguments;                                                                                                   \
        _exit(0);                                                                                                               \
      }                                                                                                                         \
      errno = EIO;                                                                                                              \
      return -1;                                                                                                                \
    }                                                                                                                           \
    result = REAL(name) arguments;                                                                                              \
    if (what == TORN) die();                                                                                                    \
    if (what == LATE) {                                                                                                         \
      errno = EIO;                                                                                                              \
      return -1;                                                                                                                \
    }                                                                                                                           \
    return result;                                                                                                              \
  }

CHANGE(rename, "rename", AT_FDCWD, b, (const char *a, const char *b), (a, b))
CHANGE(renameat, "rename", e, b, (int d, const char *a, int e, const char *b), (d, a, e, b))
CHANGE(link, "link", AT_FDCWD, b, (const char *a, const char *b), (a, b))
CHANGE(linkat, "link", e, b, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f))
CHANGE(symlink, "symlink", AT_FDCWD, b, (const char *a, const char *b), (a, b))
CHANGE(symlinkat, "symlink", d, b, (const char *a, int d, const char *b), (a, d, b))
CHANGE(unlink, "unlink", AT_FDCWD, a, (const char *a), (a))
CHANGE(unlinkat, "unlink", d, a, (int d, const char *a, int f), (d, a, f))
CHANGE(rmdir, "unlink", AT_FDCWD, a, (const char *a), (a))
CHANGE(mkdir, "mkdir", AT_FDCWD, a, (const char *a, mode_t m), (a, m))
CHANGE(mkdirat, "mkdir", d, a, (int d, const char *a, mode_t m), (d, a, m))
CHANGE(fsync, "fsync", f, NULL, (int f), (f))
CHANGE(fdatasync, "fsync", f, NULL, (int f), (f))
CHANGE(fchmod, "fchmod", f, NULL, (int f, mode_t m), (f, m))
CHANGE(ftruncate, "ftruncate", f, NULL, (int f, off_t n), (f, n))
CHANGE(ftruncate64, "ftruncate", f, NULL, (int f, off64_t n), (f, n))
CHANGE(flock, "flock", f, NULL, (int f, int o), (f, o))

#define WRITE(name, parameters, arguments, half)                                                                                \
  ssize_t name parameters {                                                                                                     \
    int what = fate("write", f, NULL);                                                                                          \
    if (what == DENY) return -1;                                                                                                \
    if (what == TORN) {                                                                                                         \
      REAL(name) half;                                                                                                          \
      die();                                                                                                                    \
    }                                                                                                                           \
    if (what == LATE || what == SHOWN) {                                                                                        \
      errno = EIO;                                                                                                              \
      return -1;                                                                                                                \
    }                                                                                                                           \
    return REAL(name) arguments;                                                                                                \
  }

WRITE(write, (int f, const void *b, size_t n), (f, b, n), (f, b, n / 2))
WRITE(pwrite, (int f, const void *b, size_t n, off_t o), (f, b, n, o), (f, b, n / 2, o))
WRITE(pwrite64, (int f, const void *b, size_t n, off64_t o), (f, b, n, o), (f, b, n / 2, o))

#define OPEN(name, directory, parameters, arguments)                                                                            \
  int name parameters {                                                                                                         \
    mode_t mode = 0;                                                                                                            \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                                        \
      va_list list;                                                                                                             \
      va_start(list, flags);                                                                                                    \
      mode = va_arg(list, mode_t);                                                                                              \
      va_end(list);                                                                                                             \
    }                                                                                                                           \
    int what = flags & O_CREAT ? fate("create", directory, path) : NOTHING;                                                     \
    if (what == LATE || what == SHOWN) errno = EIO;                                                                              \
    if (what == DENY || what == LATE || what == SHOWN) return -1;                                                                                                                              \
    int result = REAL(name) arguments;                                                                                          \
    if (what == TORN) die();                                                                                                    \
    return result;                                                                                                              \
  }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, d, (int d, const char *path, int flags, ...), (d, path, flags, mode))
OPEN(openat64, d, (int d, const char *path, int flags, ...), (d, path, flags, mode))
