// The steps that programs for graphs share.
#pragma once

#include "check.h"

inline int wrong = 0;

inline void expect(const char *what, bool good) {
    printf("%-64s %s\n", what, good ? "ok" : "WRONG");
    fflush(stdout);
    wrong += !good;
}

inline cudaGraphExec_t executable(cudaGraph_t graph) {
    cudaGraphExec_t made;
    CHECK(cudaGraphInstantiate(&made, graph, 0));
    return made;
}

// Ends the capture of a stream, and makes an executable of it.
inline cudaGraphExec_t captured(cudaStream_t stream) {
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t made = executable(graph);
    CHECK(cudaGraphDestroy(graph));
    return made;
}

inline void launch(cudaGraphExec_t graph, cudaStream_t stream) {
    CHECK(cudaGraphLaunch(graph, stream));
    CHECK(cudaStreamSynchronize(stream));
}
