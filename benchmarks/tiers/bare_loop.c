// The limit: random direct reads of a file and nothing else, one thread with io_uring or many with pread.
//   bare_loop FILE ring|threads DEPTH COUNT SEED ENTRIES SEGMENT_BYTES SEGMENT_ENTRIES GROUP_BYTES GROUP_ENTRIES
//             ENTRY_BYTES BLOCK_BYTES RECORD_BYTES
// Reads the blocks of COUNT random entries, and prints seconds and seconds of the processor. The ring copies so many
// bytes of each entry to where they belong in an array of COUNT; 0: it leaves them where they are.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int file;
static long depth, count, entries, segment_bytes, segment_entries, group_bytes, group_entries, entry_bytes, block_bytes;
static long record_bytes;
static char* records;
static uint64_t state;
static long taken;
#define MOST (16 << 10)

static uint64_t next_random(uint64_t* s) {
  uint64_t z = (*s += 0x9E3779B97F4A7C15u);
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// Where the blocks of a random entry begin, how many bytes they have, and where among them the entry begins.
static long place(uint64_t* s, long* bytes, long* inside) {
  const long slot = (long)(next_random(s) % (uint64_t)entries), in_segment = slot % segment_entries;
  const long at = slot / segment_entries * segment_bytes + in_segment / group_entries * group_bytes +
                  in_segment % group_entries * entry_bytes;
  const long begin = at / block_bytes * block_bytes;
  *inside = at - begin;
  *bytes = (at + entry_bytes + block_bytes - 1) / block_bytes * block_bytes - begin;
  return begin;
}

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static void* reader(void* seed) {
  uint64_t s = (uint64_t)(uintptr_t)seed;
  void* memory = aligned_alloc(4096, MOST);
  while (__atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED) < count) {
    long bytes, inside;
    const long begin = place(&s, &bytes, &inside);
    if (pread(file, memory, (size_t)bytes, begin) != bytes) fail("pread");
  }
  free(memory);
  return NULL;
}

static void by_threads(void) {
  pthread_t* threads = malloc(sizeof(pthread_t) * (size_t)depth);
  for (long i = 0; i < depth; ++i) pthread_create(&threads[i], NULL, reader, (void*)(uintptr_t)(state + (uint64_t)i * 977));
  for (long i = 0; i < depth; ++i) pthread_join(threads[i], NULL);
}

static void by_ring(void) {
  struct io_uring_params p;
  memset(&p, 0, sizeof p);
  p.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
  const int ring = (int)syscall(__NR_io_uring_setup, depth, &p);
  if (ring < 0) fail("io_uring_setup");
  const size_t size = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe) + p.sq_entries * 4 + 4096;
  char* rings = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
  struct io_uring_sqe* sqes = mmap(NULL, p.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                                   ring, IORING_OFF_SQES);
  uint32_t *tail = (uint32_t*)(rings + p.sq_off.tail), *array = (uint32_t*)(rings + p.sq_off.array);
  uint32_t *done = (uint32_t*)(rings + p.cq_off.head), *answered = (uint32_t*)(rings + p.cq_off.tail);
  const uint32_t mask = *(uint32_t*)(rings + p.sq_off.ring_mask), cq_mask = *(uint32_t*)(rings + p.cq_off.ring_mask);
  struct io_uring_cqe* cqes = (struct io_uring_cqe*)(rings + p.cq_off.cqes);
  char* memory = aligned_alloc(4096, (size_t)depth * MOST);
  struct {
    void* base;
    size_t bytes;
  } vector = {memory, (size_t)depth * MOST};
  const int fixed = syscall(__NR_io_uring_register, ring, IORING_REGISTER_BUFFERS, &vector, 1) == 0;
  long *unused = malloc(sizeof(long) * (size_t)depth), *from = malloc(sizeof(long) * (size_t)depth);
  for (long i = 0; i < depth; ++i) unused[i] = i;
  long free_slots = depth, asked = 0, ended = 0;
  uint32_t unsent = 0;
  while (ended < count) {
    while (free_slots > 0 && asked < count) {
      const long slot = unused[--free_slots];
      long bytes;
      const long begin = place(&state, &bytes, &from[slot]);
      struct io_uring_sqe* sqe = &sqes[*tail & mask];
      memset(sqe, 0, sizeof *sqe);
      sqe->opcode = fixed ? IORING_OP_READ_FIXED : IORING_OP_READ;
      sqe->fd = file;
      sqe->off = (uint64_t)begin;
      sqe->addr = (uint64_t)(uintptr_t)(memory + slot * MOST);
      sqe->len = (uint32_t)bytes;
      sqe->user_data = (uint64_t)slot;
      array[*tail & mask] = *tail & mask;
      __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
      ++asked, ++unsent;
    }
    const long sent = syscall(__NR_io_uring_enter, ring, unsent, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    if (sent < 0 && errno != EINTR) fail("io_uring_enter");
    if (sent > 0) unsent -= (uint32_t)sent;
    uint32_t head = *done;
    const uint32_t end = __atomic_load_n(answered, __ATOMIC_ACQUIRE);
    for (; head != end; ++head, ++ended) {
      if (cqes[head & cq_mask].res <= 0) fail("a read");
      const long slot = unused[free_slots++] = (long)cqes[head & cq_mask].user_data;
      if (record_bytes > 0)  // in any order, as rows are wanted
        memcpy(records + (size_t)ended * 7919 % (size_t)count * (size_t)record_bytes, memory + slot * MOST + from[slot],
               (size_t)record_bytes);
    }
    __atomic_store_n(done, head, __ATOMIC_RELEASE);
  }
}

static double processor_seconds(const struct rusage* usage) {
  return (double)(usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) +
         (double)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec) * 1e-6;
}

int main(int argc, char** argv) {
  if (argc != 14) return 2;
  long* numbers[] = {&depth, &count, NULL, &entries, &segment_bytes, &segment_entries, &group_bytes, &group_entries,
                     &entry_bytes, &block_bytes, &record_bytes};
  for (int i = 0; i < 11; ++i)
    if (numbers[i] != NULL) *numbers[i] = atol(argv[3 + i]);
  state = strtoull(argv[5], NULL, 10) * 0x9E3779B97F4A7C15u;
  file = open(argv[1], O_RDONLY | O_DIRECT);
  if (file < 0) fail(argv[1]);
  records = malloc((size_t)(count * record_bytes) + 1);
  memset(records, 1, (size_t)(count * record_bytes));
  struct timespec begun, ended;
  struct rusage before, usage;
  getrusage(RUSAGE_SELF, &before);
  clock_gettime(CLOCK_MONOTONIC, &begun);
  if (strcmp(argv[2], "ring") == 0) by_ring(); else by_threads();
  clock_gettime(CLOCK_MONOTONIC, &ended);
  getrusage(RUSAGE_SELF, &usage);
  printf("%.6f %.6f\n", (double)(ended.tv_sec - begun.tv_sec) + (double)(ended.tv_nsec - begun.tv_nsec) * 1e-9,
         processor_seconds(&usage) - processor_seconds(&before));
  return 0;
}
