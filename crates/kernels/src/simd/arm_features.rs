//! Tokens of NEON and its dot products, made where the process may use them alone.

/// Proof that this process may use NEON, and a token of dot products of bytes if the selected instruction set includes them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon(Option<DotProd>);

/// Proof that this process may use `sdot`, which adds four products of bytes to each 32 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DotProd(());

impl Neon {
    /// The token without dot products. NEON is part of the target, so that there is nothing to ask.
    pub(crate) fn base() -> Neon {
        const { assert!(cfg!(target_feature = "neon")) };
        Neon(None)
    }

    /// The token with dot products, if the machine has them.
    pub(crate) fn with_dot_products() -> Option<Neon> {
        std::arch::is_aarch64_feature_detected!("dotprod").then_some(Neon(Some(DotProd(()))))
    }

    /// Dot products of bytes, if the set includes them.
    pub(crate) fn dot_products(self) -> Option<DotProd> {
        self.0
    }
}
