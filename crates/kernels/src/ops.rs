//! Element-wise steps of a layer.

use half::{bf16, f16};

use crate::buffer::{Buffer, Slice};
use crate::cpu::Cpu;
use crate::device::FillRow;
use crate::disjoint::DisjointMut;
use crate::isa;
use crate::simd::{Elem, Kernel, Simd, load_part, store_part};

/// Elements that one task takes.
const CHUNK: usize = 1 << 14;

/// Numerically stable softmax over the slice, in place, with the instruction set of the process
/// ([`Isa::selected`](crate::Isa::selected)). An empty slice stays empty.
pub fn softmax(x: &mut [f32]) {
    isa::process_level().run(Softmax(x));
}

struct Softmax<'a>(&'a mut [f32]);

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let x = self.0;
        let (n, p) = (x.len(), x.as_mut_ptr());
        let Some(&first) = x.first() else { return };
        let whole = n - n % S::LANES;
        // SAFETY: every access is to elements below `n`.
        unsafe {
            let mut max = simd.splat(first);
            for i in (0..whole).step_by(S::LANES) {
                max = simd.max(max, simd.load(p.add(i)));
            }
            let max = x[whole..].iter().copied().fold(simd.largest(max), f32::max);
            let mut sum = simd.splat(0.0);
            for i in (0..n).step_by(S::LANES) {
                let v = simd.exp(simd.sub(load_part(simd, p.add(i), n - i), simd.splat(max)));
                store_part(simd, p.add(i), v, n - i);
                sum = simd.add(sum, load_part(simd, p.add(i), n - i));
            }
            let total = simd.splat(simd.sum(sum));
            for i in (0..n).step_by(S::LANES) {
                let v = simd.div(load_part(simd, p.add(i), n - i), total);
                store_part(simd, p.add(i), v, n - i);
            }
        }
    }
}

/// y = x / √(mean x² + eps) · weight, row by row.
pub(crate) struct RmsNorm<'a> {
    /// Rows of `weight.len()`.
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    /// As long as `x`.
    pub(crate) y: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let n = self.weight.len();
        for (x, y) in self.x.chunks_exact(n).zip(self.y.chunks_exact_mut(n)) {
            let (x, w, y) = (x.as_ptr(), self.weight.as_ptr(), y.as_mut_ptr());
            // SAFETY: every access is to elements below `n` of slices of `n`.
            unsafe {
                let mut squares = [simd.splat(0.0); 4];
                for i in (0..n).step_by(4 * S::LANES) {
                    for (j, sum) in squares.iter_mut().enumerate() {
                        let i = i + j * S::LANES;
                        if i < n {
                            let v = load_part(simd, x.add(i), n - i);
                            *sum = simd.fma(v, v, *sum);
                        }
                    }
                }
                let [a, b, c, d] = squares;
                let mean = simd.sum(simd.add(simd.add(a, b), simd.add(c, d))) / n as f32;
                let scale = simd.splat(1.0 / (mean + self.eps).sqrt());
                for i in (0..n).step_by(S::LANES) {
                    let v = simd.mul(load_part(simd, x.add(i), n - i), scale);
                    let v = simd.mul(v, load_part(simd, w.add(i), n - i));
                    store_part(simd, y.add(i), v, n - i);
                }
            }
        }
    }
}

/// Rotates the first `2 · cos.len()` elements of a vector at `src` and writes them to `dst` (may be `src`).
///
/// # Safety
/// Both must be valid for that many elements; `cos` and `sin` must be equally long.
#[inline(always)]
unsafe fn rotate<S: Simd, E: Elem>(simd: S, src: *const E, dst: *mut E, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for i in (0..half).step_by(S::LANES) {
        let n = half - i;
        // SAFETY: `i` and the count stay below `half`.
        unsafe {
            let (c, s) = (load_part(simd, cos.as_ptr().add(i), n), load_part(simd, sin.as_ptr().add(i), n));
            let a = load_part(simd, src.add(i), n);
            let b = load_part(simd, src.add(half + i), n);
            store_part(simd, dst.add(i), simd.sub(simd.mul(a, c), simd.mul(b, s)), n);
            store_part(simd, dst.add(half + i), simd.add(simd.mul(b, c), simd.mul(a, s)), n);
        }
    }
}

/// Rotary embedding of tokens × heads × head_dim, in place.
struct Rope<'a> {
    x: &'a mut [f32],
    heads: usize,
    head_dim: usize,
    /// tokens × half
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
}

impl Kernel for Rope<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let half = self.half;
        for (t, x) in self.x.chunks_exact_mut(self.heads * self.head_dim).enumerate() {
            let (cos, sin) = (&self.cos[t * half..][..half], &self.sin[t * half..][..half]);
            for x in x.chunks_exact_mut(self.head_dim) {
                let x = x.as_mut_ptr();
                // SAFETY: 2 · half <= head_dim, checked by `Cpu::rope`.
                unsafe { rotate(simd, x.cast_const(), x, cos, sin) };
            }
        }
    }
}

/// Rotation and destination of tokens' vectors.
#[derive(Clone, Copy)]
struct Placement<'a> {
    heads: usize,
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
    slots: &'a [u32],
    capacity: usize,
}

/// Places `tokens`' vectors of `heads`, rotated.
struct Place<'a, E> {
    to: Placement<'a>,
    src: &'a [E],
    dst: &'a DisjointMut<'a, E>,
    tokens: std::ops::Range<usize>,
    heads: std::ops::Range<usize>,
}

impl<E: Elem + Send> Kernel for Place<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Placement { heads, head_dim: d, cos, sin, half, slots, capacity } = self.to;
        for t in self.tokens {
            let (cos, sin) = (&cos[t * half..][..half], &sin[t * half..][..half]);
            for h in self.heads.clone() {
                let src = &self.src[(t * heads + h) * d..][..d];
                let at = (h * capacity + slots[t] as usize) * d;
                // SAFETY: tasks have different heads or, the slots being different, different tokens.
                let dst = unsafe { self.dst.part(at..at + d) };
                // SAFETY: 2 · half <= head_dim, checked by `Cpu::place`.
                unsafe { rotate(simd, src.as_ptr(), dst.as_mut_ptr(), cos, sin) };
                dst[2 * half..].copy_from_slice(&src[2 * half..]);
            }
        }
    }
}

/// Rounds columns of some rows.
pub(crate) struct Round<'a, E> {
    pub(crate) src: &'a [f32],
    /// As long.
    pub(crate) out: &'a mut [E],
}

impl<E: Elem> Kernel for Round<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        assert_eq!(self.src.len(), self.out.len(), "each is rounded to one");
        for (src, out) in self.src.chunks(S::LANES).zip(self.out.chunks_mut(S::LANES)) {
            // SAFETY: both have as many elements as are named.
            unsafe {
                let v = load_part(simd, src.as_ptr(), out.len());
                store_part(simd, out.as_mut_ptr(), v, out.len());
            }
        }
    }
}

impl Cpu {
    /// Splits `rows` rows of `width` elements into tasks of whole rows; few elements are computed on this thread.
    pub(crate) fn by_rows(&self, rows: usize, width: usize, f: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let each = (CHUNK / width.max(1)).max(1);
        self.parallel_if(rows * width > 2 * CHUNK, rows.div_ceil(each), &|t| {
            f(t * each..((t + 1) * each).min(rows));
        });
    }

    /// y\[r\] = x\[r\] / √(mean(x\[r\]²) + eps) · weight, rows of `weight.len()`.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
        let n = weight.len();
        assert!(x.len() == y.len() && x.len().is_multiple_of(n), "x and y are rows of the weight's length");
        let rows = x.len() / n;
        let y = DisjointMut::new(y);
        self.by_rows(rows, n, &|r| {
            let r = r.start * n..r.end * n;
            // SAFETY: these rows belong to this task.
            let y = unsafe { y.part(r.clone()) };
            self.run(RmsNorm { x: &x[r], weight, eps, y });
        });
    }

    /// Rotary embedding, half-split pairs (i, i + rot/2), i < rot/2; elements past `rot` are unchanged.
    /// x: tokens × heads × head_dim; cos, sin: tokens × rot/2.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn rope(&self, x: &mut [f32], heads: usize, head_dim: usize, cos: &[f32], sin: &[f32], rot: usize) {
        let (width, half) = (heads * head_dim, rot / 2);
        assert!(rot <= head_dim && x.len().is_multiple_of(width), "x is tokens × heads × head_dim");
        let tokens = x.len() / width;
        assert!(cos.len() == tokens * half && sin.len() == tokens * half, "cos and sin are tokens × rot/2");
        let x = DisjointMut::new(x);
        self.by_rows(tokens, width, &|r| {
            // SAFETY: these tokens belong to this task.
            let x = unsafe { x.part(r.start * width..r.end * width) };
            let (cos, sin) = (&cos[r.start * half..r.end * half], &sin[r.start * half..r.end * half]);
            self.run(Rope { x, heads, head_dim, cos, sin, half });
        });
    }

    /// Rotates keys stored before RoPE and places them for attention: src is tokens × heads × head_dim, dst is
    /// heads × capacity × head_dim in the same type; token t goes to slot `slots[t]`. cos, sin: tokens × rot/2.
    ///
    /// Computes in `f32` and rounds once. The same code serves fresh and cached keys, so equal stored values
    /// give equal bits.
    ///
    /// # Panics
    /// If lengths or types do not fit.
    #[allow(clippy::too_many_arguments)]
    pub fn place_keys(
        &self,
        src: Slice,
        heads: usize,
        head_dim: usize,
        cos: &[f32],
        sin: &[f32],
        rot: usize,
        slots: &[u32],
        dst: &mut Buffer,
    ) {
        let capacity = dst.len() / (heads * head_dim).max(1);
        let to = Placement { heads, head_dim, cos, sin, half: rot / 2, slots, capacity };
        match (src, dst) {
            (Slice::F32(src), Buffer::F32(dst)) => self.place::<f32>(to, src, dst),
            (Slice::F16(src), Buffer::F16(dst)) => self.place::<f16>(to, src, dst),
            (Slice::Bf16(src), Buffer::Bf16(dst)) => self.place::<bf16>(to, src, dst),
            (src, dst) => panic!("{} cannot be placed among {}", src.dtype(), dst.dtype()),
        }
    }

    fn place<E: Elem>(&self, to: Placement, src: &[E], dst: &mut [E]) {
        let Placement { heads, head_dim, cos, sin, half, slots, capacity } = to;
        let tokens = slots.len();
        assert!(2 * half <= head_dim, "rot is at most head_dim");
        assert_eq!(src.len(), tokens * heads * head_dim, "src is tokens × heads × head_dim");
        assert!(cos.len() == tokens * half && sin.len() == tokens * half, "cos and sin are tokens × rot/2");
        assert!(slots.iter().all(|s| (*s as usize) < capacity), "slots are below {capacity}");
        let dst = &DisjointMut::new(dst);
        if slots.windows(2).all(|w| w[0] < w[1]) {
            self.by_rows(tokens, heads * head_dim, &|tokens| {
                self.run(Place { to, src, dst, tokens, heads: 0..heads });
            });
        } else {
            // Two tokens may have one slot, so that only heads are disjoint.
            self.parallel_if(src.len() > 2 * CHUNK, heads, &|h| {
                self.run(Place { to, src, dst, tokens: 0..tokens, heads: h..h + 1 });
            });
        }
    }

    /// Rows of `width`, each filled by `row`, which gets its index.
    pub(crate) fn fill_rows(&self, width: usize, row: &FillRow<'_>, out: &mut [f32]) {
        let rows = out.len() / width;
        let out = DisjointMut::new(out);
        self.by_rows(rows, width, &|r| {
            // SAFETY: row `i` belongs to this task.
            r.for_each(|i| row(i, unsafe { out.part(i * width..(i + 1) * width) }));
        });
    }

    /// dst (rows.len() × width) = src\[rows\].
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn gather_rows(&self, src: &[f32], width: usize, rows: &[u32], dst: &mut [f32]) {
        assert_eq!(dst.len(), rows.len() * width, "dst is rows × width");
        let out = DisjointMut::new(dst);
        self.by_rows(rows.len(), width, &|r| {
            for i in r {
                let from = rows[i] as usize * width;
                // SAFETY: row `i` belongs to this task.
                unsafe { out.part(i * width..(i + 1) * width) }.copy_from_slice(&src[from..from + width]);
            }
        });
    }
}
