/* Slow disks, slow links and clocks that jump, for processes that this library was preloaded into and whose session has
   a slot on a page that they share with whoever makes the faults. Counted there is how often one of these struck, and how
   often a write was refused or a disk was seen to have no room. All else is as it was. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 32 };
struct slot { volatile int64_t session, disk_us, link_us, clock_s, hits; };
static struct slot *page;

__attribute__((constructor)) static void open_page(void) {
    const char *path = getenv("PLAIT_CHAOS_PAGE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, SLOTS * sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) page = found;
}

/* The slot of this process, where it is meant. */
static struct slot *mine(void) {
    pid_t session = 0;
    for (int number = 0; page && number < SLOTS; number++) {
        if (!page[number].session) continue;
        if (!session) session = getsid(0);
        if (page[number].session == session) return &page[number];
    }
    return NULL;
}

static void hit(struct slot *slot) { __sync_fetch_and_add(&slot->hits, 1); }

static void delay(struct slot *slot, int64_t us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    hit(slot);
    nanosleep(&time, NULL);
}

static void slow_disk(int file) {
    struct slot *slot = mine();
    struct stat found;
    if (slot && slot->disk_us && fstat(file, &found) == 0 && S_ISREG(found.st_mode)) delay(slot, slot->disk_us);
}

static void slow_link(void) {
    struct slot *slot = mine();
    if (slot && slot->link_us) delay(slot, slot->link_us);
}

/* What a call has come to; a disk without room, or a file that may not grow, is noted. */
static ssize_t told(ssize_t result) {
    int why = errno;
    struct slot *slot = result < 0 && (why == ENOSPC || why == EFBIG) ? mine() : NULL;
    if (slot) hit(slot);
    errno = why;
    return result;
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int file, const void *data, size_t size) { NEXT(write); slow_disk(file); return told(next(file, data, size)); }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { NEXT(pwrite); slow_disk(file); return told(next(file, data, size, at)); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { NEXT(pwrite64); slow_disk(file); return told(next(file, data, size, at)); }
ssize_t writev(int file, const struct iovec *parts, int count) { NEXT(writev); slow_disk(file); return told(next(file, parts, count)); }
int fsync(int file) { NEXT(fsync); slow_disk(file); return next(file); }
int fdatasync(int file) { NEXT(fdatasync); slow_disk(file); return next(file); }
ssize_t send(int file, const void *data, size_t size, int flags) { NEXT(send); slow_link(); return next(file, data, size, flags); }
ssize_t sendmsg(int file, const struct msghdr *message, int flags) { NEXT(sendmsg); slow_link(); return next(file, message, flags); }
ssize_t recv(int file, void *data, size_t size, int flags) { NEXT(recv); slow_link(); return next(file, data, size, flags); }

int fallocate(int file, int mode, off_t at, off_t size) { NEXT(fallocate); return (int)told(next(file, mode, at, size)); }
int fallocate64(int file, int mode, off64_t at, off64_t size) { NEXT(fallocate64); return (int)told(next(file, mode, at, size)); }

static int room(int result, unsigned long blocks) {
    struct slot *slot = result == 0 && blocks == 0 ? mine() : NULL;
    if (slot) hit(slot);
    return result;
}

int statvfs(const char *restrict path, struct statvfs *restrict found) { NEXT(statvfs); return room(next(path, found), found->f_bavail); }
int statvfs64(const char *restrict path, struct statvfs64 *restrict found) { NEXT(statvfs64); return room(next(path, found), found->f_bavail); }

int clock_gettime(clockid_t which, struct timespec *found) {
    NEXT(clock_gettime);
    int result = next(which, found);
    struct slot *slot = result == 0 && which == CLOCK_REALTIME ? mine() : NULL;
    if (slot && slot->clock_s) {
        found->tv_sec += slot->clock_s;
        hit(slot);
    }
    return result;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return result;
}
