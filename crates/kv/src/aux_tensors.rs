//! Auxiliary tensors of a chunk: what a method computed of the chunk once, when it was prefilled, besides keys and values.

use refrain_kernels::Buffer;

/// Named tensors of one chunk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AuxTensors {
    tensors: Vec<Tensor>,
}

/// A named tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Name, which no other tensor of the chunk's [`AuxTensors`] has.
    pub name: String,
    /// Sizes, the slowest first.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub data: Buffer,
}

impl AuxTensors {
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

    /// The tensor of this name, to be filled.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Tensor> {
        self.tensors.iter_mut().find(|tensor| tensor.name == name)
    }

    /// All tensors, in the order in which they were added.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.data.as_slice().as_bytes().len()).sum()
    }
}
