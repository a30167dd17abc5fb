// What the loop of gelu is given. Formulas: deepspeed/ops/transformer/gelu.py.
#pragma once

#include <cstdint>

#include "common/half.h"

namespace ds_cpu {

// [Note: one polynomial for gelu]
// gelu(x) = x * (1/2 + x P(2 (x / bound)^2 - 1)) for |x| < bound, x above and 0 below. P was fitted by weighted least
// squares at 4000 Chebyshev nodes, reweighted until the largest error was least (Lawson's algorithm); in its centered
// variable the coefficients do not cancel. As many terms as the dtype can show. Largest error of gelu before rounding
// to the dtype: fp32 6e-7 (erf) and 9e-7 (tanh), where torch's own have 1.2e-6 and 4e-7; fp16 2e-6; bf16 7e-6.
template <int kTerms>
struct GeluCurve {
    float bound;
    float terms[kTerms];  // lowest power first
};

template <typename T>
struct GeluCurves;

template <>
struct GeluCurves<float> {
    static constexpr int kTerms = 15;
    static constexpr GeluCurve<kTerms> kErf = {
        5.2f,
        {0.135949978f, -0.0677438056f, 0.0500261099f, -0.0399253974f, 0.0319623226f, -0.0247634505f, 0.0181339263f,
         -0.0123533564f, 0.00801007868f, -0.00506737363f, 0.00266245964f, -0.00097851072f, 0.000600746493f,
         -0.000562292049f, 0.000202393844f}};
    static constexpr GeluCurve<kTerms> kTanh = {
        4.9f,
        {0.144248624f, -0.0716991875f, 0.0523729298f, -0.0406614256f, 0.0309279914f, -0.0221099351f, 0.0148009457f,
         -0.00985182227f, 0.00600670004f, -0.0021380438f, 0.000928703734f, -0.00222731564f, 0.00156906466f,
         0.000236767348f, -0.000363211886f}};
};

template <>
struct GeluCurves<Fp16> {
    static constexpr int kTerms = 13;
    static constexpr GeluCurve<kTerms> kErf = {
        5.0f,
        {0.141363788f, -0.0702962806f, 0.0515205223f, -0.0404426074f, 0.0314421726f, -0.0232686523f, 0.0164021732f,
         -0.0111643405f, 0.00641051334f, -0.00268557366f, 0.00172279639f, -0.00161326573f, 0.000608728455f}};
    static constexpr GeluCurve<kTerms> kTanh = {
        4.8f,
        {0.147233485f, -0.0730630836f, 0.0530595231f, -0.0406649743f, 0.0303083828f, -0.0213556339f, 0.0141461707f,
         -0.00838614302f, 0.00438082073f, -0.00285100628f, 0.00224988142f, -0.00106745608f, 0.00017663404f}};
};

template <>
struct GeluCurves<Bf16> {
    static constexpr int kTerms = 11;
    static constexpr GeluCurve<kTerms> kErf = {
        4.7f,
        {0.15031462f, -0.0743646171f, 0.0535612999f, -0.0404915745f, 0.029976473f, -0.0213463416f, 0.0132681306f,
         -0.00646429159f, 0.00413812767f, -0.00360932221f, 0.00140048984f}};
    static constexpr GeluCurve<kTerms> kTanh = {
        4.6f,
        {0.153572205f, -0.075867736f, 0.0542668509f, -0.0403295897f, 0.0289873612f, -0.0197627273f, 0.0116555855f,
         -0.00558166671f, 0.00397560291f, -0.00357900558f, 0.00135887564f}};
};

struct GeluArgs {
    int64_t cols;
    bool tanh;
    const float* bias;  // per column; null: none, and the tensor is one long row
    const void* x;
    void* out;
};

}  // namespace ds_cpu
