// The arithmetic of one element, defined once: what "bit-identical" means here. Host and CUDA compile this very code (without contraction: every fused
// multiply-add is written out), and the Highway kernels are tested against it bit for bit.
//
// T is the computing type: double for float64 averages, float for all others. p and e are the parameter and the average in T, W = T(weight), D = T(decay).
//
//   kCopy         p
//   kLerp         W < 1/2: fma(W, p - e, e)     else fma(W - 1, p - e, p)      torch.lerp
//   kMulAdd       fma(p, W, round(e D))                                        e.mul_(d).add_(p, alpha=1-d)
//   kTwoProducts  round(e D) + round(p W)                                      e*d + (1.-d)*p (timm's ModelEma)
//   kStochastic   float32 averages: e + fma(W, p - e, (u - 1/2) ulp(e)), u uniform in (0, 1), 16 bits, symmetric, so that the mean is exact
//                 16-bit averages: e + k ulp(e), k = rint(W (p - e) / ulp(e) + u - 1/2), and a second draw where that crosses a power of two
