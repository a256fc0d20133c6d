/* What a rank does of a collective through memory that ranks share: copies, typed sums, counters to wait for.

   In: rows of numbers that steps.py writes, and where memory lies in this process. Out: the row at which it stopped; it
   can go on from there. It never allocates, never looks at Python, and a wait never lasts longer than it is told to.
   core.py has the same in Python. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* By what a processor can, not by who made it: of AMD's, `arch=haswell` takes none, and sums of half precision then take
   18 times as long. Older compilers cannot say that. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#define PAUSE() __builtin_ia32_pause()
#elif defined(__x86_64__)
#define CLONES __attribute__((target_clones("arch=haswell", "default")))
#define PAUSE() __builtin_ia32_pause()
#else
#define CLONES
#define PAUSE() ((void)0)
#endif

enum { COPY, REDUCE, POST, WAIT, COME, CHECK };
enum { COUNTER = 0, ANNOUNCED = 1, SIGNATURES = 8, RING = 64, SIGNATURE_WORDS = 16, COMPARED_WORDS = 6 };
enum { BELL = 0, SLEEPERS = 1 };
enum { ROW = 8, DONE = -1, DISAGREE = -2 };
enum { BLOCK = 4096, MOST = 256 };

typedef struct {
  int64_t ranks, own, spins;
  volatile uint32_t *headers[MOST]; /* of each rank in this group */
  volatile uint32_t *bells[MOST];   /* of each rank: rung when something came for it and it sleeps */
} Group;

typedef uint16_t bf16;
static inline float from_bf16(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static inline bf16 to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#define SAME(x) (x)
#define SUM(a, b) ((a) + (b))
#define PRODUCT(a, b) ((a) * (b))
#define GREATER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define LESS(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

/* All sources as one, the first rank's first, rounded after each. `out` may be one of the sources. */
#define KERNEL(NAME, T, W, FROM, TO, JOIN)                                                                 \
  CLONES static void NAME(T *out, T **in, long ranks, long count) {                                        \
    if (ranks == 2) {                                                                                      \
      T *a = in[0], *b = in[1];                                                                            \
      _Pragma("GCC ivdep") for (long i = 0; i < count; i++) {                                              \
        W x = FROM(a[i]), y = FROM(b[i]);                                                                  \
        out[i] = TO((W)JOIN(x, y));                                                                        \
      }                                                                                                    \
      return;                                                                                              \
    }                                                                                                      \
    T sum[BLOCK];                                                                                          \
    for (long at = 0; at < count; at += BLOCK) {                                                           \
      long size = count - at < BLOCK ? count - at : BLOCK;                                                 \
      memcpy(sum, in[0] + at, size * sizeof(T));                                                           \
      for (long r = 1; r < ranks; r++) {                                                                   \
        T *b = in[r] + at;                                                                                 \
        for (long i = 0; i < size; i++) {                                                                  \
          W x = FROM(sum[i]), y = FROM(b[i]);                                                              \
          sum[i] = TO((W)JOIN(x, y));                                                                      \
        }                                                                                                  \
      }                                                                                                    \
      memcpy(out + at, sum, size * sizeof(T));                                                             \
    }                                                                                                      \
  }
#define KERNELS(NAME, T, W, FROM, TO)                                                                      \
  KERNEL(NAME##_sum, T, W, FROM, TO, SUM)                                                                  \
  KERNEL(NAME##_product, T, W, FROM, TO, PRODUCT)                                                          \
  KERNEL(NAME##_max, T, W, FROM, TO, GREATER)                                                              \
  KERNEL(NAME##_min, T, W, FROM, TO, LESS)
#define MEAN(NAME, T, W, FROM, TO)                                                                         \
  CLONES static void NAME##_mean(T *out, T **in, long ranks, long count) {                                 \
    NAME##_sum(out, in, ranks, count);                                                                     \
    for (long i = 0; i < count; i++) out[i] = TO((W)(FROM(out[i]) / (W)ranks));                            \
  }

KERNELS(f32, float, float, SAME, SAME)
KERNELS(f64, double, double, SAME, SAME)
KERNELS(f16, _Float16, float, SAME, SAME)
KERNELS(b16, bf16, float, from_bf16, to_bf16)
KERNELS(i64, int64_t, int64_t, SAME, SAME)
KERNELS(i32, int32_t, int32_t, SAME, SAME)
KERNELS(i16, int16_t, int16_t, SAME, SAME)
KERNELS(i8, int8_t, int8_t, SAME, SAME)
KERNELS(u8, uint8_t, uint8_t, SAME, SAME)
MEAN(f32, float, float, SAME, SAME)
MEAN(f64, double, double, SAME, SAME)
MEAN(f16, _Float16, float, SAME, SAME)
MEAN(b16, bf16, float, from_bf16, to_bf16)

typedef void (*Kernel)(void *, void **, long, long);
#define ALL(NAME) {(Kernel)NAME##_sum, (Kernel)NAME##_mean, (Kernel)NAME##_product, (Kernel)NAME##_max, (Kernel)NAME##_min}
#define WHOLE(NAME) {(Kernel)NAME##_sum, 0, (Kernel)NAME##_product, (Kernel)NAME##_max, (Kernel)NAME##_min}
static const Kernel KERNEL_OF[9][5] = {ALL(f32), ALL(f64), ALL(f16), ALL(b16), WHOLE(i64),
                                       WHOLE(i32), WHOLE(i16), WHOLE(i8), WHOLE(u8)};
static const long SIZE_OF[9] = {4, 8, 2, 2, 8, 4, 2, 1, 1};

static int have_all(const Group *group, int word, uint32_t wanted) {
  for (long r = 0; r < group->ranks; r++)
    if ((int32_t)(__atomic_load_n(&group->headers[r][word], __ATOMIC_SEQ_CST) - wanted) < 0) return 0;
  return 1;
}

static int64_t now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

/* Who sleeps says so first and looks again: whoever sees nobody sleep has written before that look. */
void plait_listen(volatile uint32_t *bell, int32_t by) { __atomic_add_fetch(&bell[SLEEPERS], by, __ATOMIC_SEQ_CST); }

/* Until the bell is rung, which it was where it is no longer `seen`. */
void plait_sleep(volatile uint32_t *bell, uint32_t seen, int64_t limit_us) {
  struct timespec limit = {limit_us / 1000000, (limit_us % 1000000) * 1000};
  syscall(SYS_futex, &bell[BELL], FUTEX_WAIT, seen, &limit, 0, 0);
}

void plait_ring(volatile uint32_t *bell) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (!__atomic_load_n(&bell[SLEEPERS], __ATOMIC_SEQ_CST)) return;
  __atomic_add_fetch(&bell[BELL], 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &bell[BELL], FUTEX_WAKE, 0x7fffffff, 0, 0, 0);
}

/* 1 where a word of all ranks has come so far; 0 after `limit_us`. Spins shortly, then sleeps until it is woken. */
static int wait_for(const Group *group, int word, uint32_t wanted, int64_t limit_us) {
  if (have_all(group, word, wanted)) return 1;
  if (limit_us <= 0) return 0;
  for (int64_t i = 0; i < group->spins; i++) {
    for (int j = 0; j < 32; j++) PAUSE();
    if (have_all(group, word, wanted)) return 1;
  }
  for (int i = 0; i < 4; i++) {
    sched_yield();
    if (have_all(group, word, wanted)) return 1;
  }
  volatile uint32_t *bell = group->bells[group->own];
  int64_t end_us = now_us() + limit_us, left_us = limit_us;
  int came = 0;
  plait_listen(bell, 1);
  for (;;) {
    uint32_t seen = __atomic_load_n(&bell[BELL], __ATOMIC_SEQ_CST);
    came = have_all(group, word, wanted);
    if (came || left_us <= 0) break;
    plait_sleep(bell, seen, left_us);
    left_us = end_us - now_us();
  }
  plait_listen(bell, -1);
  return came;
}

static void tell(const Group *group, int word, uint32_t value) {
  __atomic_store_n(&group->headers[group->own][word], value, __ATOMIC_SEQ_CST);
  for (long r = 0; r < group->ranks; r++)
    if (r != group->own) plait_ring(group->bells[r]);
}

static volatile uint64_t *signature_of(const Group *group, long rank, uint64_t number) {
  return (volatile uint64_t *)group->headers[rank] + SIGNATURES + SIGNATURE_WORDS * (number % RING);
}

/* Say what this rank's next collective is. Nobody is woken whom a later post will wake. */
void plait_announce(const Group *group, const uint64_t *signature, int64_t rings) {
  volatile uint64_t *place = signature_of(group, group->own, signature[0]);
  for (int i = 0; i < SIGNATURE_WORDS; i++) place[i] = signature[i];
  uint32_t count = (uint32_t)signature[0] + 1;
  if (rings)
    tell(group, ANNOUNCED, count);
  else
    __atomic_store_n(&group->headers[group->own][ANNOUNCED], count, __ATOMIC_SEQ_CST);
}

static void reduce(const int64_t *row, char **at, long ranks) {
  void *in[MOST];
  for (long r = 0; r < ranks; r++) in[r] = at[row[3] + r] + row[4];
  KERNEL_OF[row[6]][row[7]](at[row[1]] + row[2], in, ranks, row[5] / SIZE_OF[row[6]]);
}

/* Rows from `row` on, until one has to wait longer than `limit_us`: its position. DONE: all are done. DISAGREE - r: rank r
   does something else than this one. `at`: where memory lies; `base`: this rank's counter before the first row. */
int64_t plait_advance(const Group *group, const int64_t *rows, int64_t count, int64_t row, uint32_t base, char **at,
                      const uint64_t *signature, int64_t limit_us) {
  for (; row < count; row++) {
    const int64_t *step = rows + ROW * row;
    switch (step[0]) {
    case COPY:
      memmove(at[step[1]] + step[2], at[step[3]] + step[4], step[5]);
      break;
    case REDUCE:
      reduce(step, at, group->ranks);
      break;
    case POST:
      tell(group, COUNTER, base + (uint32_t)step[1]);
      break;
    case WAIT:
      if (!wait_for(group, COUNTER, base + (uint32_t)step[1], limit_us)) return row;
      break;
    case COME:
      if (!wait_for(group, ANNOUNCED, (uint32_t)signature[0] + 1, limit_us)) return row;
      break;
    case CHECK:
      for (long r = 0; r < group->ranks; r++) {
        volatile uint64_t *place = signature_of(group, r, signature[0]);
        for (int i = 0; i < COMPARED_WORDS; i++)
          if (place[i] != signature[i]) return DISAGREE - r;
      }
      break;
    }
  }
  return DONE;
}

/* float32 in about 27 bits, without losing one: numbers that travel together are of about one size. Of a block's
   exponents three bits say which of six consecutive ones it is, or that it is zero, or that four bits among the block's
   `far` ones say how far it is below the largest. A block is HEAD bytes (the largest exponent, where the six begin below
   it, how many are far), codes, low and high bits of signs and fractions, `far` ones; HEAD alone, where all bits are
   zero; or a zero and the numbers themselves, where exponents differ by more, and at the end, where numbers are too few
   for a block. */
enum { PACKED = 256, HEAD = 3, CODES = PACKED * 3 / 8, FIXED = HEAD + CODES + 3 * PACKED };
enum { NEAR = 6, NOTHING = 6, FAR = 7, SHIFTS = 4, FURTHEST = 15, EMPTY = 255 };

CLONES static int is_empty(const uint32_t *in) {
  uint32_t bits = 0;
  for (int i = 0; i < PACKED; i++) bits |= in[i];
  return !bits;
}

/* How far each exponent is below the largest, which it returns; zeros are beyond all others. */
CLONES static uint32_t depths_of(const uint32_t *in, uint8_t *depth) {
  uint8_t exponents[PACKED], most = 1;
  for (int i = 0; i < PACKED; i++) exponents[i] = in[i] >> 23;
  for (int i = 0; i < PACKED; i++) most = exponents[i] > most ? exponents[i] : most;
  for (int i = 0; i < PACKED; i++) depth[i] = exponents[i] ? most - exponents[i] : 255;
  return most;
}

/* How many are no zeros and outside of the six from `shift` on; -1 where one is too far for any. */
CLONES static int count_far(const uint8_t *depth, int shift) {
  int far = 0, beyond = 0;
  for (int i = 0; i < PACKED; i++) {
    uint8_t d = depth[i];
    far += (uint8_t)(d - shift) >= NEAR && d != 255;
    beyond += d > FURTHEST && d != 255;
  }
  return beyond ? -1 : far;
}

CLONES static void pack_block(const uint32_t *in, const uint8_t *depth, int shift, uint8_t *out) {
  uint8_t codes[PACKED], far[PACKED + 1], *high = out + CODES + 2 * PACKED;
  uint16_t low[PACKED];
  for (int i = 0; i < PACKED; i++) {
    uint8_t d = depth[i], near = d - shift;
    codes[i] = d == 255 ? NOTHING : near < NEAR ? near : FAR;
    low[i] = in[i];
    high[i] = (in[i] >> 16 & 0x7f) | in[i] >> 31 << 7;
  }
  memcpy(out + CODES, low, sizeof low);
  for (int i = 0; i < PACKED; i += 8, out += 3) {
    uint32_t word = 0;
    for (int j = 0; j < 8; j++) word |= (uint32_t)codes[i + j] << 3 * j;
    out[0] = word, out[1] = word >> 8, out[2] = word >> 16;
  }
  int count = 0;
  for (int i = 0; i < PACKED; i++) far[count] = depth[i], count += codes[i] == FAR;
  far[count] = 0;
  out = high + PACKED;
  for (int i = 0; i < count; i += 2) *out++ = far[i] | far[i + 1] << 4;
}

CLONES static int unpack_block(const uint8_t *in, uint32_t most, uint32_t shift, int count, uint32_t *out) {
  uint8_t codes[PACKED], exponents[PACKED], far[PACKED + 2];
  uint16_t low[PACKED];
  const uint8_t *high = in + CODES + 2 * PACKED;
  memcpy(low, in + CODES, sizeof low);
  for (int i = 0; i < PACKED; i += 8, in += 3) {
    uint32_t word = in[0] | in[1] << 8 | in[2] << 16;
    for (int j = 0; j < 8; j++) codes[i + j] = word >> 3 * j & 7;
  }
  for (int i = 0; i < count; i += 2) far[i] = high[PACKED + i / 2] & 15, far[i + 1] = high[PACKED + i / 2] >> 4;
  for (int i = 0; i < PACKED; i++) exponents[i] = codes[i] == NOTHING ? 0 : most - shift - codes[i];
  int at = 0;
  for (int i = 0; i < PACKED; i++)
    if (codes[i] == FAR) {
      if (at == count) return 0;
      exponents[i] = most - far[at++];
    }
  for (int i = 0; i < PACKED; i++)
    out[i] = (uint32_t)(high[i] >> 7) << 31 | (uint32_t)exponents[i] << 23 | (uint32_t)(high[i] & 0x7f) << 16 | low[i];
  return at == count;
}

/* Bytes that `count` numbers take, at most four a number and one a block. */
int64_t plait_pack(const uint32_t *in, int64_t count, uint8_t *out) {
  uint8_t *at = out, depth[PACKED];
  for (; count > 0; in += PACKED, count -= PACKED) {
    if (count >= PACKED && is_empty(in)) {
      at[0] = 1, at[1] = EMPTY, at[2] = 0, at += HEAD;
      continue;
    }
    uint32_t most = count >= PACKED ? depths_of(in, depth) : 0;
    int shift = 0, far = most ? count_far(depth, 0) : -1;
    for (int i = 1; far > 0 && i <= SHIFTS; i++) {
      int other = count_far(depth, i);
      if (other < far) far = other, shift = i;
    }
    if (far >= 0 && far < PACKED / 2) {
      at[0] = most, at[1] = shift, at[2] = far;
      pack_block(in, depth, shift, at + HEAD);
      at += FIXED + (far + 1) / 2;
    } else {
      int64_t size = 4 * (count < PACKED ? count : PACKED);
      *at = 0;
      memcpy(at + 1, in, size);
      at += 1 + size;
    }
  }
  return at - out;
}

/* Whether `size` bytes are `count` numbers: they came from another process, and nothing is written beyond these. */
int64_t plait_unpack(const uint8_t *in, int64_t size, uint32_t *out, int64_t count) {
  const uint8_t *end = in + size;
  for (; count > 0; out += PACKED, count -= PACKED) {
    int64_t raw = 4 * (count < PACKED ? count : PACKED), left = end - in;
    if (left < 1) return 0;
    if (left >= HEAD && count >= PACKED && *in && in[1] == EMPTY) {
      memset(out, 0, raw);
      in += HEAD;
    } else if (*in) {
      if (count < PACKED || left < FIXED || left < FIXED + (in[2] + 1) / 2) return 0;
      if (!unpack_block(in + HEAD, in[0], in[1], in[2], out)) return 0;
      in += FIXED + (in[2] + 1) / 2;
    } else {
      if (left < 1 + raw) return 0;
      memcpy(out, in + 1, raw);
      in += 1 + raw;
    }
  }
  return in == end;
}

int64_t plait_version(void) { return 2; }
