//! What a method computed of a chunk once, when it was prefilled, and keeps beside its keys and values.

use refrain_kernels::Buffer;

/// Named tensors of one chunk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    tensors: Vec<Tensor>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name, unlike the others'.
    pub name: String,
    /// Its sizes, the slowest first.
    pub shape: Vec<usize>,
    /// Its elements, row-major.
    pub data: Buffer,
}

impl Summary {
    /// Adds a tensor.
    ///
    /// # Panics
    /// If there is one of this name, or `data` has another length than the shape says.
    pub fn push(&mut self, name: impl Into<String>, shape: impl Into<Vec<usize>>, data: Buffer) {
        let (name, shape) = (name.into(), shape.into());
        assert!(self.get(&name).is_none(), "{name} is there already");
        assert_eq!(shape.iter().product::<usize>(), data.len(), "{name} is as long as its shape says");
        self.tensors.push(Tensor { name, shape, data });
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The same, to be filled.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Tensor> {
        self.tensors.iter_mut().find(|tensor| tensor.name == name)
    }

    /// All of them, in the order in which they were added.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.data.as_slice().as_bytes().len()).sum()
    }
}
