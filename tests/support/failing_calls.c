/* A preloaded library that makes calls on files fail. FAILING_CALL (open, read, write, opendir,
   rename, mkdir) fails on paths that contain FAILING_PATH, with FAILING_ERRNO, FAILING_TIMES times,
   and, if FAILING_WHILE is set, only while there is a file of this name. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int done;

static int fails(const char *call, const char *path) {
  const char *wanted = getenv("FAILING_CALL"), *part = getenv("FAILING_PATH");
  if (!wanted || !part || !path || strcmp(call, wanted) || !strstr(path, part)) return 0;
  const char *name = getenv("FAILING_WHILE");
  if (name && syscall(SYS_access, name, F_OK)) return 0;
  if (atomic_fetch_add(&done, 1) >= atoi(getenv("FAILING_TIMES"))) return 0;
  errno = atoi(getenv("FAILING_ERRNO"));
  return 1;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                            \
  int name(const char *path, int flags, ...) {                \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    mode_t mode = va_arg(rest, mode_t);                       \
    va_end(rest);                                             \
    if (fails("open", path)) return -1;                       \
    return REAL(int, name, const char *, int, ...)(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                          \
  int name(int at, const char *path, int flags, ...) {        \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    mode_t mode = va_arg(rest, mode_t);                       \
    va_end(rest);                                             \
    if (fails("open", path)) return -1;                       \
    return REAL(int, name, int, const char *, int, ...)(at, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

static int fd_fails(const char *call, int fd) {
  const char *wanted = getenv("FAILING_CALL");
  if (!wanted || strcmp(call, wanted)) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails(call, path);
}

ssize_t read(int fd, void *to, size_t size) {
  if (fd_fails("read", fd)) return -1;
  return REAL(ssize_t, read, int, void *, size_t)(fd, to, size);
}

ssize_t pread64(int fd, void *to, size_t size, off_t at) {
  if (fd_fails("read", fd)) return -1;
  return REAL(ssize_t, pread64, int, void *, size_t, off_t)(fd, to, size, at);
}

ssize_t write(int fd, const void *from, size_t size) {
  if (fd_fails("write", fd)) return -1;
  return REAL(ssize_t, write, int, const void *, size_t)(fd, from, size);
}

ssize_t writev(int fd, const struct iovec *from, int count) {
  if (fd_fails("write", fd)) return -1;
  return REAL(ssize_t, writev, int, const struct iovec *, int)(fd, from, count);
}

#define PWRITE(name)                                                     \
  ssize_t name(int fd, const void *from, size_t size, off_t at) {        \
    if (fd_fails("write", fd)) return -1;                                \
    return REAL(ssize_t, name, int, const void *, size_t, off_t)(fd, from, size, at); \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

DIR *opendir(const char *path) {
  if (fails("opendir", path)) return NULL;
  return REAL(DIR *, opendir, const char *)(path);
}

int rename(const char *from, const char *to) {
  if (fails("rename", from)) return -1;
  return REAL(int, rename, const char *, const char *)(from, to);
}

int mkdir(const char *path, mode_t mode) {
  if (fails("mkdir", path)) return -1;
  return REAL(int, mkdir, const char *, mode_t)(path, mode);
}
