//! The CPU as a device: a thread pool and an instruction set.

use std::fmt;
use std::sync::Arc;

use crate::isa::{Isa, IsaError};
use crate::linear::Linear;
use crate::pool::{self, Pool};
#[cfg(target_arch = "x86_64")]
use crate::simd::features::{Amx, Avx2, Bf16};
use crate::simd::{Kernel, Level};
use crate::weight_arena::WeightArena;

/// A CPU with its persistent thread pool and the memory of weights. Cheap to clone; clones share both.
#[derive(Clone)]
pub struct Cpu {
    pool: Arc<Pool>,
    weight_arena: Arc<WeightArena>,
    isa: Isa,
    level: Level,
    batch_invariant: bool,
}

impl Cpu {
    /// A pool of `threads` threads, the calling thread among them, with the instruction set [`Isa::selected`]. With 0
    /// threads, one per available core.
    ///
    /// # Errors
    /// If the environment variable `REFRAIN_CPU` names no instruction set, or one that this machine lacks.
    pub fn new(threads: usize) -> Result<Cpu, IsaError> {
        Cpu::with_isa(threads, Isa::selected()?)
    }

    /// A pool of `threads` threads, as in [`Cpu::new`], with the instruction set `isa`.
    ///
    /// # Errors
    /// If this machine lacks the instruction set.
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Cpu, IsaError> {
        let level = isa.level().ok_or(IsaError::Unavailable(isa))?;
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = if threads == 0 { cores() } else { threads };
        let (pool, weight_arena) = (Arc::new(Pool::new(threads)), Arc::default());
        Ok(Cpu { pool, weight_arena, isa, level, batch_invariant: false })
    }

    /// A CPU of the calling thread alone, with the same instruction set.
    pub fn single_threaded(&self) -> Cpu {
        Cpu { pool: Arc::new(Pool::new(1)), ..self.clone() }
    }

    /// Number of threads that share the work.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of threads that would share work begun now: work begun inside a task stays on its thread.
    pub(crate) fn sharing(&self) -> usize {
        if pool::inside_task() { 1 } else { self.threads() }
    }

    /// Runs a kernel with the instruction set in use.
    pub(crate) fn run<K: Kernel>(&self, kernel: K) -> K::Output {
        self.level.run(kernel)
    }

    /// The tile registers, if the instruction set in use includes them.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn amx(&self) -> Option<Amx> {
        self.level.amx()
    }

    /// AVX2, if it is the instruction set in use.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn avx2(&self) -> Option<Avx2> {
        match self.level {
            Level::Avx2(simd) => Some(simd),
            _ => None,
        }
    }

    /// BF16, if the instruction set in use multiplies pairs with it.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn fast_pairs(&self) -> Option<Bf16> {
        match self.level {
            Level::Avx512Dots(simd) => simd.features().bf16(),
            _ => None,
        }
    }

    /// Whether products of bytes are the fastest of this instruction set, with weights of four bits or eight. Those of VNNI are about twice as
    /// fast as those of `bf16` pairs, but slower than those of tiles. AVX2's of few rows are twice as fast as its products of numbers, and nearly four
    /// times with four bits, where they are ahead of AVX-512's products of numbers, too.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_fast_byte_products(&self, four_bits: bool) -> bool {
        match self.level.avx512() {
            Some(features) => (features.vnni().is_some() || four_bits) && features.amx().is_none(),
            None => self.avx2().is_some(),
        }
    }

    /// Whether products of bytes are the fastest of this instruction set. `sdot` does sixteen products where `fmla` does four; without it
    /// bytes are multiplied to 16 bits, eight at a time.
    #[cfg(target_arch = "aarch64")]
    pub(crate) fn has_fast_byte_products(&self, _: bool) -> bool {
        matches!(self.level, Level::Neon(_))
    }

    /// Instruction sets of other processors have none.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub(crate) fn has_fast_byte_products(&self, _: bool) -> bool {
        false
    }

    /// Whether each row of a product is computed as if it were alone.
    pub(crate) fn is_batch_invariant(&self) -> bool {
        self.batch_invariant
    }

    /// This CPU, computing each row of a product as if it were alone.
    pub(crate) fn to_batch_invariant(&self) -> Cpu {
        Cpu { batch_invariant: true, ..self.clone() }
    }

    /// Runs `f(0..tasks)`, each index exactly once, dynamically balanced over the pool; returns when all are done.
    ///
    /// Several threads may call it at once: their jobs share the workers. Called from inside a task, it runs inline.
    ///
    /// # Panics
    /// With the panic of a task; the remaining tasks may then be left out.
    pub fn parallel(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        self.pool.run(tasks, f);
    }

    /// Memory of packed weights.
    pub(crate) fn weight_arena(&self) -> &WeightArena {
        &self.weight_arena
    }

    /// Tells the weights that the next product reads.
    pub(crate) fn expect(&self, w: &Linear) {
        self.pool.expect(w.panels().words);
    }

    /// Runs the tasks on the pool if they are worth waking its threads, otherwise on this thread, one after the other.
    pub(crate) fn parallel_if(&self, worth: bool, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        if worth { self.parallel(tasks, f) } else { (0..tasks).for_each(f) }
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cpu")
            .field("threads", &self.threads())
            .field("isa", &self.isa)
            .finish_non_exhaustive()
    }
}
