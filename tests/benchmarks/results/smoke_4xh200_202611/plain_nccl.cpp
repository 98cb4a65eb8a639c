// All-reduce of float32 as nccl-tests' all_reduce_perf -g N measures it: one process, a group call over all GPUs,
// 5 runs to warm up, 20 timed together. Prints MiB, ms and bus bandwidth in GB/s (2 (n - 1) / n of the bytes).
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <cuda_runtime.h>
#include <nccl.h>
#define CUDA(x) do { cudaError_t e = (x); if (e != cudaSuccess) { std::fprintf(stderr, "%s: %s\n", #x, cudaGetErrorString(e)); std::exit(1); } } while (0)
#define NCCL(x) do { ncclResult_t e = (x); if (e != ncclSuccess) { std::fprintf(stderr, "%s: %s\n", #x, ncclGetErrorString(e)); std::exit(1); } } while (0)
int main() {
  int n = 0, version = 0;
  CUDA(cudaGetDeviceCount(&n));
  NCCL(ncclGetVersion(&version));
  std::printf("NCCL %d, %d GPUs\n", version, n);
  std::vector<ncclComm_t> comms(n);
  std::vector<cudaStream_t> streams(n);
  std::vector<float *> buffers(n);
  NCCL(ncclCommInitAll(comms.data(), n, nullptr));
  const size_t most = 1024ull << 20;
  for (int i = 0; i < n; ++i) {
    CUDA(cudaSetDevice(i));
    CUDA(cudaStreamCreate(&streams[i]));
    CUDA(cudaMalloc(&buffers[i], most));
    CUDA(cudaMemset(buffers[i], 0, most));
  }
  for (size_t mib : {1, 8, 64, 256, 1024}) {
    const size_t count = (mib << 20) / sizeof(float);
    auto run = [&](int times) {
      for (int t = 0; t < times; ++t) {
        NCCL(ncclGroupStart());
        for (int i = 0; i < n; ++i) NCCL(ncclAllReduce(buffers[i], buffers[i], count, ncclFloat, ncclSum, comms[i], streams[i]));
        NCCL(ncclGroupEnd());
      }
      for (int i = 0; i < n; ++i) { CUDA(cudaSetDevice(i)); CUDA(cudaStreamSynchronize(streams[i])); }
    };
    for (int turn = 0; turn < 3; ++turn) {
      run(5);
      auto began = std::chrono::steady_clock::now();
      run(20);
      double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / 20;
      std::printf("%zu MiB: %.4f ms, %.2f GB/s\n", mib, s * 1e3, count * sizeof(float) / s / 1e9 * 2 * (n - 1) / n);
    }
  }
  return 0;
}
