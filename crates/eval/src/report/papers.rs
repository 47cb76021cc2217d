//! The papers' tables in the papers' layouts, with the papers' own numbers in tables beside.

use std::collections::BTreeSet;

use super::data::Data;
use super::layout::{Arms, Kind, Layout, Shown};
use super::measures::{
    HIT_RATE_40, KEPT, KL, KV, KV_SHARE, KV_SHARE_QUERY, RECOMPUTED, RELATIVE, TOP1, TTFT_SPEEDUP,
};
use super::published::{self, Published};
use super::table::{Block, Section, counted, distinct};
use super::tables::{lines, scores};
use crate::tasks::longbench;

/// A paper.
struct Paper {
    title: &'static str,
    layouts: &'static [Layout],
    published: &'static [Published],
}

const ABLATION: Kind = Kind::Costs(&[RELATIVE, KL, TOP1, KEPT, RECOMPUTED, TTFT_SPEEDUP]);
const A3_ROWS: &[(&str, &str)] = &[
    ("vanilla", ""),
    ("full_reuse", ""),
    ("pie", ""),
    ("cache_blend", ""),
    ("lego_link", ""),
    ("a3", ""),
    ("a3+a3_ex", ""),
];
const CACHE_BLEND_ROWS: &[(&str, &str)] =
    &[("vanilla", "full recompute"), ("full_reuse", ""), ("cache_blend", "")];
const MORPH_ROWS: &[(&str, &str)] = &[("vanilla", "Full"), ("h2o", ""), ("snap_kv", ""), ("morph_kv", "")];

const PAPERS: &[Paper] = &[
    Paper {
        title: "A3 (arXiv:2511.17560)",
        layouts: &[
            Layout {
                title: "LongBench",
                benchmarks: &["longbench"],
                tasks: longbench::A3,
                rows: A3_ROWS,
                arms: Arms::Fusion,
                kind: Kind::Scores(true),
            },
            Layout {
                title: "RULER",
                benchmarks: &["ruler"],
                tasks: &[
                    "niah_single_1",
                    "niah_single_2",
                    "niah_single_3",
                    "niah_multikey_1",
                    "niah_multikey_2",
                    "niah_multikey_3",
                    "niah_multiquery",
                    "niah_multivalue",
                    "cwe",
                    "fwe",
                    "vt",
                ],
                rows: A3_ROWS,
                arms: Arms::Fusion,
                kind: Kind::Scores(true),
            },
        ],
        published: published::A3,
    },
    Paper {
        title: "SamKV (arXiv:2508.11661)",
        layouts: &[
            Layout {
                title: "Sequence and recompute ratio (table 1)",
                benchmarks: &["longbench", "rag"],
                tasks: longbench::SAMKV,
                rows: &[("cache_blend", ""), ("lego_link", "EPIC"), ("sam_kv", "")],
                arms: Arms::Fusion,
                kind: Kind::Costs(&[KEPT, RECOMPUTED]),
            },
            Layout {
                title: "Multi-context questions (tables 3 and 4)",
                benchmarks: &["longbench", "rag"],
                tasks: longbench::SAMKV,
                rows: &[
                    ("vanilla", "Recompute"),
                    ("full_reuse", "Reuse"),
                    ("multi_inf_llm", ""),
                    ("cache_blend", ""),
                    ("lego_link", "EPIC"),
                    ("sam_kv:update=overwrite", "overwrite"),
                    ("sam_kv", "fusion"),
                ],
                arms: Arms::Fusion,
                kind: Kind::Scores(true),
            },
            Layout {
                title: "Ablation of SamKV's parts",
                benchmarks: &["longbench", "rag"],
                tasks: longbench::SAMKV,
                rows: &[],
                arms: Arms::Differing("sam_kv", ""),
                kind: ABLATION,
            },
        ],
        published: published::SAM_KV,
    },
    Paper {
        title: "MorphKV (arXiv:2503.00979)",
        layouts: &[
            Layout {
                title: "LongBench",
                benchmarks: &["longbench"],
                tasks: longbench::MORPHKV,
                rows: MORPH_ROWS,
                arms: Arms::Eviction,
                kind: Kind::Scores(true),
            },
            Layout {
                title: "LongGenBench",
                benchmarks: &["longgenbench"],
                tasks: &[],
                rows: MORPH_ROWS,
                arms: Arms::Eviction,
                kind: Kind::Scores(false),
            },
            Layout {
                title: "LongWriter",
                benchmarks: &["longwriter"],
                tasks: &[],
                rows: MORPH_ROWS,
                arms: Arms::Eviction,
                kind: Kind::Scores(false),
            },
            Layout {
                title: "Memory",
                benchmarks: &["longbench", "longgenbench", "longwriter"],
                tasks: &[],
                rows: MORPH_ROWS,
                arms: Arms::Eviction,
                kind: Kind::Costs(&[KV_SHARE, KV_SHARE_QUERY, KV]),
            },
            Layout {
                title: "Fusion of the window's attention (table 4)",
                benchmarks: &["longbench"],
                tasks: longbench::MORPHKV,
                rows: &[],
                arms: Arms::Differing("morph_kv", "fuse"),
                kind: Kind::Scores(true),
            },
            Layout {
                title: "Length of the window (tables 5 and 6)",
                benchmarks: &["longbench", "longgenbench", "longwriter"],
                tasks: &[],
                rows: &[],
                arms: Arms::Differing("morph_kv", "window"),
                kind: Kind::Costs(&[RELATIVE, KL, TOP1, KV_SHARE]),
            },
        ],
        published: published::MORPH_KV,
    },
    Paper {
        title: "CacheBlend (EuroSys 2025, arXiv:2405.16444)",
        layouts: &[
            Layout {
                title: "Multi-document questions",
                benchmarks: &["rag"],
                tasks: &[],
                rows: CACHE_BLEND_ROWS,
                arms: Arms::Fusion,
                kind: Kind::Scores(true),
            },
            Layout {
                title: "Quality and time",
                benchmarks: &["rag"],
                tasks: &[],
                rows: CACHE_BLEND_ROWS,
                arms: Arms::Fusion,
                kind: Kind::Costs(&[RELATIVE, KL, TOP1, HIT_RATE_40, RECOMPUTED, TTFT_SPEEDUP]),
            },
        ],
        published: published::CACHE_BLEND,
    },
];

/// A section a paper whose tasks were run, and one for what no paper's table shows.
pub(super) fn sections(data: &Data<'_>) -> Vec<Section> {
    let mut sections = Vec::new();
    let mut shown = BTreeSet::new();
    for paper in PAPERS {
        let tables = paper.layouts.iter().flat_map(|layout| layout.tables(data));
        let (tables, cells): (Vec<_>, Vec<Shown>) = tables.unzip();
        shown.extend(cells.into_iter().flatten());
        if !tables.is_empty() {
            let published = paper.published.iter().map(Published::table);
            let blocks = tables.into_iter().chain(published).map(Block::Table).collect();
            sections.push(Section { title: paper.title.to_owned(), blocks });
        }
    }
    sections.extend(others(data, &shown));
    sections
}

/// Tables of the tasks of which no paper's table shows the scores of some arm, one a benchmark.
fn others(data: &Data<'_>, shown: &BTreeSet<[usize; 3]>) -> Option<Section> {
    let mut blocks = Vec::new();
    for model in 0..data.models.len() {
        let hidden = |task: &usize| {
            data.arms_of(model, &[*task]).into_iter().any(|arm| !shown.contains(&[model, *task, arm]))
        };
        let tasks: Vec<usize> = data.tasks_of(model).into_iter().filter(hidden).collect();
        for benchmark in distinct(tasks.iter().map(|task| data.tasks[*task].benchmark.clone())) {
            let here: Vec<usize> =
                tasks.iter().copied().filter(|task| data.tasks[*task].benchmark == benchmark).collect();
            let lines = lines(data, &data.arms_of(model, &here), &[]);
            let mut table = scores(data, model, &here, &lines, None);
            let tasks = counted(here.len(), "task");
            table.title = format!("{benchmark}: {}, {tasks}", data.models[model]);
            blocks.extend((!table.columns.is_empty()).then_some(Block::Table(table)));
        }
    }
    (!blocks.is_empty()).then(|| Section { title: "Other tasks".to_owned(), blocks })
}
