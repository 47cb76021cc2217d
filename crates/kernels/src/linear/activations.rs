//! Rows of activations that products take and give: rows of `f32`, or tiles as the next product reads them.

use std::cell::Cell;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::blocking::Blocking;
use super::blocking::MatmulPath;
use super::weights::Linear;
use crate::cpu::Cpu;
use crate::device::Norm;
use crate::disjoint::DisjointMut;
use crate::scratch::{self, AlignedVec, ScratchGuard};
use crate::simd::PANEL;

thread_local! {
    /// Rows between two products.
    static ACTIVE: Cell<AlignedVec> = const { Cell::new(AlignedVec::new()) };
}

/// Rows that a product takes.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// Rows of `f32`, which are normed first where there is a norm.
    Rows(&'a [f32], Option<Norm<'a>>),
    /// Rows that are packed for this product, and their number.
    #[cfg(target_arch = "x86_64")]
    Packed(&'a [u32], usize),
}

impl Input<'_> {
    /// Number of rows of `width`.
    pub(super) fn rows(&self, width: usize) -> usize {
        match self {
            Input::Rows(x, _) => {
                assert!(x.len().is_multiple_of(width), "x is m × {width}");
                x.len() / width
            }
            #[cfg(target_arch = "x86_64")]
            Input::Packed(_, rows) => *rows,
        }
    }
}

/// The rows that a product writes.
pub(crate) enum Output<'a> {
    Rows(&'a mut [f32]),
    /// Rows whose first `at` columns, a multiple of a panel's, lie apart from the rest.
    Split {
        first: &'a mut [f32],
        rest: &'a mut [f32],
        at: usize,
    },
    /// Tiles, as the next product reads them.
    #[cfg(target_arch = "x86_64")]
    Packed(&'a mut [u32], PackedRows),
}

/// How the rows of an output are packed.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct PackedRows {
    /// The blocking of the product that takes them.
    pub(super) blocking: Blocking,
    /// Rows of the whole output.
    pub(super) rows: usize,
    /// Columns of the output.
    pub(super) inputs: usize,
}

/// The part of an [`Output`] that the tasks of a product write at a time.
pub(super) enum TaskOutput<'a> {
    Rows(TaskRows<'a>),
    /// Tiles of all rows of the output; `first` is the index of the first row that is computed now.
    #[cfg(target_arch = "x86_64")]
    Packed {
        words: DisjointMut<'a, u32>,
        to: PackedRows,
        first: usize,
    },
}

impl<'a> TaskOutput<'a> {
    /// Rows of `f32`.
    ///
    /// # Panics
    /// If they are packed.
    pub(super) fn rows(&self) -> &TaskRows<'a> {
        match self {
            TaskOutput::Rows(y) => y,
            #[cfg(target_arch = "x86_64")]
            TaskOutput::Packed { .. } => panic!("only gated products with tiles of AMX write packed rows"),
        }
    }
}

/// Rows of `f32`, in one matrix or with the columns after the first ones in another.
pub(super) struct TaskRows<'a> {
    first: Matrix<'a>,
    rest: Option<Matrix<'a>>,
}

struct Matrix<'a> {
    y: DisjointMut<'a, f32>,
    width: usize,
}

impl<'a> Matrix<'a> {
    /// Some of the rows, `width` each.
    fn of(y: &'a mut [f32], rows: Range<usize>, width: usize) -> Matrix<'a> {
        Matrix { y: DisjointMut::new(&mut y[rows.start * width..rows.end * width]), width }
    }
}

impl TaskRows<'_> {
    /// The matrix that has these columns, and the first one's index there.
    #[inline(always)]
    fn at(&self, columns: &Range<usize>) -> (&Matrix<'_>, usize) {
        let (of, start) = match &self.rest {
            Some(rest) if columns.start >= self.first.width => (rest, columns.start - self.first.width),
            _ => (&self.first, columns.start),
        };
        assert!(start + columns.len() <= of.width, "the columns {columns:?} lie in one matrix");
        (of, start)
    }

    /// Columns of row `row`, which lie in one matrix.
    ///
    /// # Safety
    /// No two parts that overlap may be alive at the same time.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part(&self, row: usize, columns: Range<usize>) -> &mut [f32] {
        let (of, start) = self.at(&columns);
        let at = row * of.width + start;
        // SAFETY: the caller's.
        unsafe { of.y.part(at..at + columns.len()) }
    }

    /// The address of the first of these columns, which lie in one matrix, in the first of the rows, and the bytes from row to row.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn as_mut_ptr(&self, rows: Range<usize>, columns: Range<usize>) -> (*mut f32, usize) {
        let (of, start) = self.at(&columns);
        let last = (rows.end - 1) * of.width + start + columns.len();
        (of.y.as_mut_ptr(rows.start * of.width + start..last), of.width * size_of::<f32>())
    }
}

impl Output<'_> {
    /// # Panics
    /// If the output is not `m` rows of `width`.
    pub(super) fn check(&self, m: usize, width: usize) {
        match self {
            Output::Rows(y) => assert_eq!(y.len(), m * width, "y is m × {width}"),
            Output::Split { first, rest, at } => {
                assert!(at.is_multiple_of(PANEL) && *at <= width, "the first columns are whole panels");
                assert_eq!((first.len(), rest.len()), (m * *at, m * (width - *at)), "y is m × {width}");
            }
            #[cfg(target_arch = "x86_64")]
            Output::Packed(_, to) => {
                assert_eq!((to.rows, to.inputs), (m, width), "the next product takes m × {width}")
            }
        }
    }

    /// Some of the rows, `width` each.
    pub(super) fn of(&mut self, rows: Range<usize>, width: usize) -> TaskOutput<'_> {
        match self {
            Output::Rows(y) => TaskOutput::Rows(TaskRows { first: Matrix::of(y, rows, width), rest: None }),
            Output::Split { first, rest, at } => TaskOutput::Rows(TaskRows {
                first: Matrix::of(first, rows.clone(), *at),
                rest: Some(Matrix::of(rest, rows, width - *at)),
            }),
            #[cfg(target_arch = "x86_64")]
            Output::Packed(words, to) => {
                TaskOutput::Packed { words: DisjointMut::new(words), to: *to, first: rows.start }
            }
        }
    }
}

/// Rows between two products.
pub(crate) struct Active {
    words: ScratchGuard,
    len: usize,
    #[cfg(target_arch = "x86_64")]
    packed: Option<PackedRows>,
}

impl Active {
    /// Room for `rows` rows that `next` takes. Where it and the product before it, whose kernels are `path`, use tiles of AMX, the rows are
    /// packed as `next` reads them.
    pub(super) fn of(rows: usize, next: &Linear, cpu: &Cpu, path: MatmulPath) -> Active {
        #[cfg(target_arch = "x86_64")]
        if let (MatmulPath::Amx(_), to) = (path, Blocking::of(next, cpu, rows))
            && let MatmulPath::Amx(_) = to.path
        {
            let len = to.words * to.width(rows);
            let packed = Some(PackedRows { blocking: to, rows, inputs: next.inputs });
            return Active { words: scratch::borrow(&ACTIVE, len), len, packed };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (cpu, path);
        let len = rows * next.inputs;
        Active {
            words: scratch::borrow(&ACTIVE, len),
            len,
            #[cfg(target_arch = "x86_64")]
            packed: None,
        }
    }

    pub(super) fn output(&mut self) -> Output<'_> {
        #[cfg(target_arch = "x86_64")]
        if let Some(to) = self.packed {
            return Output::Packed(&mut self.words.as_u32_mut()[..self.len], to);
        }
        Output::Rows(&mut self.words.as_f32_mut()[..self.len])
    }

    /// The rows, for the product that takes them.
    pub(crate) fn input(&self) -> Input<'_> {
        #[cfg(target_arch = "x86_64")]
        if let Some(packed) = self.packed {
            return Input::Packed(&self.words.as_u32()[..self.len], packed.rows);
        }
        Input::Rows(bytemuck::cast_slice(&self.words.as_u32()[..self.len]), None)
    }
}
