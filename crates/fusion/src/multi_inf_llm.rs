//! InfLLM over several contexts, as SamKV compares with it (arXiv 2508.11661): the documents' independent caches count as
//! one context, of which the question, and then each token of the answer, retrieves blocks. Nothing is recomputed.
//!
//! A block is represented by the mean of its keys that received most attention within the document. Unless told, as many
//! blocks are retrieved as make the sequence ratio that of SamKV on the same prompt.

use std::sync::Arc;

use refrain_kernels::{Buffer, Dtype};
use refrain_kv::{AuxTensors, Span};
use refrain_registry::{MAX_COUNT, Options};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pass::planned;
use crate::retrieval::{RetrievalBudget, RetrievalPlan};
use crate::{
    CachedTokens, ChunkStatistics, ContextLayer, Error, FusionMethod, KnownBlock, LayerView, Pass,
    PassAttention, PassPlan, PrefillInputs, PromptLayout, Result, Retrieval, SamKv,
};

/// Of how representatives are made: summaries of another one are not used.
const VERSION: u32 = 1;
/// Representatives before RoPE, `layers × blocks × Hkv·d`.
const REPRESENTATIVES: &str = "k_representative";

/// Retrieve blocks of all documents as if they were one context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MultiInfLlm {
    /// Tokens of a block.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub block: usize,
    /// Tokens at the beginning that are always seen; the system part is in any case.
    #[schemars(range(max = MAX_COUNT))]
    pub initial: usize,
    /// Tokens near a row that it sees, at least as many as the question has.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub local: usize,
    /// Blocks that are retrieved; 0 for as many as SamKV's sequence ratio allows.
    #[schemars(range(max = MAX_COUNT))]
    pub topk: usize,
    /// Keys whose mean stands for a block.
    #[schemars(range(min = 1, max = MAX_COUNT))]
    pub representatives: usize,
    /// The method that decides how many tokens of blocks are retrieved where `topk` is 0.
    #[serde(skip)]
    pub like: SamKv,
}

impl Default for MultiInfLlm {
    fn default() -> Self {
        let (block, initial, local, topk, representatives) = (64, 64, 128, 0, 4);
        MultiInfLlm { block, initial, local, topk, representatives, like: SamKv::default() }
    }
}

impl Options for MultiInfLlm {
    const NAME: &'static str = "multi_inf_llm";
}

impl FusionMethod for MultiInfLlm {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> Result<Box<dyn Pass>> {
        inputs.layout.check()?;
        let sizes = self.sizes(&inputs.layout);
        // A prompt without cached documents, or a window that holds everything, is seen whole.
        if inputs.layout.reusable() == 0 || inputs.max_tokens <= sizes.local {
            return Ok(planned(PassPlan::new(inputs.layout.required_tokens())));
        }
        if self.topk > 0 {
            return self.last(inputs, sizes, RetrievalBudget::Blocks(self.topk));
        }
        let budget =
            BudgetPass { method: *self, inputs: inputs.clone(), sizes, of: self.like.start_at(inputs, 1)? };
        if budget.of.plan().probe.is_none() {
            return budget.last();
        }
        Ok(Box::new(budget))
    }

    fn goes_on(&self) -> bool {
        false
    }

    fn statistics(&self) -> Vec<&dyn ChunkStatistics> {
        let like = (self.topk == 0).then_some(&self.like as &dyn ChunkStatistics);
        [self as &dyn ChunkStatistics].into_iter().chain(like).collect()
    }
}

/// SamKV's probe, run for the number of tokens that SamKV would keep.
#[derive(Debug)]
struct BudgetPass {
    method: MultiInfLlm,
    inputs: Arc<PrefillInputs>,
    sizes: Retrieval,
    of: Box<dyn Pass>,
}

impl BudgetPass {
    /// The last pass, with as many tokens of blocks as SamKV's last pass keeps beside the first and the local ones.
    fn last(self) -> Result<Box<dyn Pass>> {
        let layout = &self.inputs.layout;
        let kept = match &self.of.plan().cached {
            CachedTokens::All => layout.documents().len(),
            CachedTokens::Selected(layers) => {
                // Missing chunks are seen whole, beside the blocks.
                layers.first().map_or(0, |layer| layer.question_sees.iter().map(|span| span.len()).sum())
            }
        };
        let kept = kept + layout.system.len() + layout.question.len();
        let tokens = kept.saturating_sub(self.sizes.initial + self.sizes.local);
        self.method.last(&self.inputs, self.sizes, RetrievalBudget::Tokens(tokens))
    }
}

impl Pass for BudgetPass {
    fn plan(&self) -> &PassPlan {
        self.of.plan()
    }

    fn observe(&mut self, layer: &LayerView<'_>) -> Result<Vec<u32>> {
        self.of.observe(layer)
    }

    fn next(self: Box<Self>) -> Result<Option<Box<dyn Pass>>> {
        let BudgetPass { of, .. } = *self;
        let Some(of) = of.next()? else { return Ok(None) };
        let next = BudgetPass { of, method: self.method, inputs: self.inputs, sizes: self.sizes };
        Ok(Some(if next.of.plan().probe.is_some() { Box::new(next) } else { next.last()? }))
    }
}

impl ChunkStatistics for MultiInfLlm {
    fn kind(&self) -> String {
        format!("multi_inf_llm-{VERSION}-{}-{}", self.block, self.representatives)
    }

    fn last_queries(&self) -> usize {
        0
    }

    fn observe(&self, layer: &ContextLayer<'_>, summary: &mut AuxTensors) {
        let (blocks, width) = (layer.tokens().div_ceil(self.block), layer.width());
        if layer.layer == 0 {
            let keys = Buffer::zeros(Dtype::F32, layer.layers * blocks * width);
            summary.push(REPRESENTATIVES, [layer.layers, blocks, width], keys);
        }
        let found = layer.representatives(self.block, self.representatives);
        if let Some(tensor) = summary.get_mut(REPRESENTATIVES) {
            tensor.data.write_f32(layer.layer * blocks * width, &found);
        }
    }
}

impl MultiInfLlm {
    /// The pass in which the question retrieves blocks.
    fn last(
        &self,
        inputs: &PrefillInputs,
        sizes: Retrieval,
        budget: RetrievalBudget,
    ) -> Result<Box<dyn Pass>> {
        let (known, from) = (self.known(inputs)?, inputs.layout.question.start);
        let retrieval = RetrievalPlan { sizes, budget, known, from };
        let plan = PassPlan::new(inputs.layout.required_tokens());
        Ok(planned(PassPlan { attention: PassAttention::BlockRetrieval(retrieval), ..plan }))
    }

    /// Sizes for a prompt.
    fn sizes(&self, prompt: &PromptLayout) -> Retrieval {
        // A block is seen whole or not at all, and blocks are cut within documents.
        let mut initial = prompt.system.len();
        for context in &prompt.chunks {
            let lacking = self.initial.saturating_sub(initial);
            initial += lacking.next_multiple_of(self.block).min(context.span.len());
        }
        Retrieval {
            initial,
            local: self.local.max(prompt.question.len()),
            block: self.block,
            representatives: self.representatives,
            rows: prompt.len().max(1),
        }
    }

    /// Blocks of the documents with their representatives.
    fn known(&self, inputs: &PrefillInputs) -> Result<Vec<KnownBlock>> {
        let (prompt, width) = (&inputs.layout, inputs.model.kv_heads * inputs.model.head_dim);
        let mut known = Vec::new();
        for (context, summary) in prompt.chunks.iter().zip(inputs.statistics_of(0)) {
            let blocks = context.span.len().div_ceil(self.block);
            let found = summary.get(REPRESENTATIVES);
            let found = found.filter(|tensor| tensor.shape == [prompt.layers, blocks, width]);
            let (start, end) = (context.span.start, context.span.end);
            let tensor = found.ok_or(Error::AuxTensors { tensor: REPRESENTATIVES, start, end })?;
            let all = tensor.data.as_slice().floats();
            for block in 0..blocks {
                let from = start as usize + block * self.block;
                let of_layer = |layer: usize| &all[(layer * blocks + block) * width..][..width];
                known.push(KnownBlock {
                    span: Span::new(from, (from + self.block).min(end as usize)),
                    keys: (0..prompt.layers).flat_map(of_layer).copied().collect(),
                });
            }
        }
        Ok(known)
    }
}
