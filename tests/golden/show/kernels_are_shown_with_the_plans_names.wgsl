// kernel 0 of step (contract.wgsl.j2): x, model.w -> t0
// dot: dot(x_b, model_w)
// grid 16x1x1 of 64x1x1, 65536 flop, 10240 bytes read, 4096 written
@group(0) @binding(0) var<storage, read_write> t0: array<f32>;
@group(0) @binding(1) var<storage, read> x_b: array<f32>;
@group(0) @binding(2) var<storage, read> model_w: array<f32>;

fn main() { let x = x_b[0]; t0[0] = x; }

// kernel 1 of step (elementwise.wgsl.j2): t0 -> t1
// from model.py:3
// tanh: tanh(t0)
// grid 16x1x1 of 64x1x1, 16384 flop, 4096 bytes read, 4096 written
@group(0) @binding(0) var<storage, read_write> t1: array<f32>;
@group(0) @binding(1) var<storage, read_write> t0: array<f32>;

fn main() { let x = t0[0]; t1[0] = x; }
