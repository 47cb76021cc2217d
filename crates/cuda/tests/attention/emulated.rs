//! Cases on emulated threads, which count the kernels that run.

use refrain_cuda::{CudaDevice, Emulated};

use crate::attention::Case;

impl Case {
    /// Asserts that a single kernel computes the case, and that it is right: a plain attention takes two, for sums and for values.
    pub(crate) fn check(&self, device: &CudaDevice<Emulated>) {
        assert_eq!(self.launches(device), 1, "one kernel on tensor cores: {}", self.head_dim);
    }

    /// Asserts that a kernel computes the case in pieces of the keys, and another one merges them, and that they are right.
    pub(crate) fn check_in_pieces(&self, device: &CudaDevice<Emulated>) {
        assert_eq!(self.launches(device), 2, "pieces and their merging: {}", self.head_dim);
    }

    fn launches(&self, device: &CudaDevice<Emulated>) -> u64 {
        let before = device.driver().launches();
        self.assert_right(device);
        device.driver().launches() - before
    }
}
