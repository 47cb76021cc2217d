//! The papers' own numbers, as printed. None of them is measured by this program.

use super::table::{Cell, Column, Row, Table};

/// A table's numbers as a paper prints them, or those of them that are known.
pub(super) struct Published {
    title: &'static str,
    /// Paper, table or section, hardware.
    source: &'static str,
    columns: &'static [&'static str],
    rows: &'static [(&'static str, &'static [&'static str])],
    note: &'static str,
}

impl Published {
    pub(super) fn table(&self) -> Table {
        let row = |(label, cells): &(&str, &[&str])| Row {
            label: (*label).to_owned(),
            cells: cells.iter().map(|cell| Cell::text(*cell)).collect(),
            ..Row::default()
        };
        Table {
            title: self.title.to_owned(),
            source: Some(self.source.to_owned()),
            columns: self.columns.iter().map(|title| Column::new(*title)).collect(),
            rows: self.rows.iter().map(row).collect(),
            notes: if self.note.is_empty() { Vec::new() } else { vec![self.note.to_owned()] },
            ..Table::default()
        }
    }
}

pub(super) const A3: &[Published] = &[
    Published {
        title: "LongBench, average of 11 tasks",
        source: "A3, arXiv:2511.17560, LongBench table (averages); RTX 3090, Transformers with FlashInfer, batch 1",
        columns: &["LLaMA3-8B", "Mistral-7B-v0.2", "Qwen2.5-7B"],
        rows: &[
            ("Vanilla", &["44.93", "38.27", "46.91"]),
            ("FullReuse", &["6.39", "8.19", "26.42"]),
            ("PIE", &["40.31", "36.50", "39.87"]),
            ("CacheBlend", &["40.23", "36.58", "41.65"]),
            ("LegoLink", &["40.02", "36.86", "42.15"]),
            ("A3", &["43.18", "36.98", "41.52"]),
            ("A3 + A3-ex (C=1024)", &["41.72", "36.60", "40.04"]),
        ],
        note: "On Qwen2.5-7B LegoLink is ahead of A3.",
    },
    Published {
        title: "RULER, 4K tokens, average of 11 tasks",
        source: "A3, arXiv:2511.17560, RULER table (averages); RTX 3090, Transformers with FlashInfer, batch 1",
        columns: &["LLaMA3-8B", "Mistral-7B-v0.2", "Qwen2.5-7B"],
        rows: &[
            ("Vanilla", &["98.16", "67.00", "98.41"]),
            ("FullReuse", &["42.65", "26.97", "43.23"]),
            ("PIE", &["73.27", "29.94", "76.97"]),
            ("CacheBlend", &["84.75", "30.27", "83.88"]),
            ("LegoLink", &["79.93", "31.12", "78.88"]),
            ("A3", &["85.67", "33.18", "84.17"]),
            ("A3 + A3-ex (C=1024)", &["66.79", "32.20", "49.43"]),
        ],
        note: "",
    },
    Published {
        title: "Qasper, LLaMA3-8B",
        source: "A3, arXiv:2511.17560, LongBench table; RTX 3090, Transformers with FlashInfer, batch 1",
        columns: &["F1"],
        rows: &[("Vanilla", &["40.52"]), ("CacheBlend", &["35.03"]), ("A3", &["39.07"])],
        note: "",
    },
    Published {
        title: "Time with A3-ex",
        source: "A3, arXiv:2511.17560; RTX 3090, Transformers with FlashInfer, batch 1",
        columns: &["TTFT", "TPOT (MultiQA)"],
        rows: &[("A3 + A3-ex (C=1024)", &["+ about 5 ms", "−25 %"])],
        note: "",
    },
    Published {
        title: "Hit rate and time",
        source: "A3, arXiv:2511.17560, figure 2 (one example of Qasper) and text; RTX 3090, batch 1",
        columns: &["Hit rate", "TTFT speed-up over Vanilla"],
        rows: &[("CacheBlend", &["30 %", "–"]), ("LegoLink", &["37.5 %", "–"]), ("A3", &["–", "about 2×"])],
        note: "",
    },
];

pub(super) const SAM_KV: &[Published] = &[
    Published {
        title: "Sequence and recompute ratio",
        source: "SamKV, arXiv:2508.11661, table 1",
        columns: &["Sequence ratio", "Recompute ratio"],
        rows: &[
            ("CacheBlend", &["100 %", "15.0 %"]),
            ("EPIC", &["100 %", "14.1 %"]),
            ("SamKV", &["14.9 %", "14.3 %"]),
        ],
        note: "",
    },
    Published {
        title: "F1, Mistral-7B",
        source: "SamKV, arXiv:2508.11661, tables 3 and 4; 64 GB NPU, 200 samples a task",
        columns: &["2WikiMQA", "MuSiQue", "HotpotQA"],
        rows: &[
            ("Recompute", &["25.06", "19.94", "37.70"]),
            ("Reuse", &["6.33", "1.92", "2.32"]),
            ("Multi-InfLLM", &["23.47", "15.77", "38.61"]),
            ("CacheBlend", &["20.42", "17.44", "33.98"]),
            ("EPIC", &["19.40", "17.22", "32.23"]),
            ("SamKV, overwrite", &["27.04", "17.20", "39.10"]),
            ("SamKV, fusion", &["27.88", "18.54", "37.66"]),
        ],
        note: "",
    },
    Published {
        title: "F1, Llama-3.1-8B",
        source: "SamKV, arXiv:2508.11661, tables 3 and 4; 64 GB NPU, 200 samples a task",
        columns: &["2WikiMQA", "MuSiQue", "HotpotQA"],
        rows: &[
            ("Recompute", &["21.48", "14.56", "24.12"]),
            ("Reuse", &["3.66", "2.23", "2.80"]),
            ("Multi-InfLLM", &["16.20", "12.70", "29.04"]),
            ("CacheBlend", &["19.12", "12.33", "22.18"]),
            ("EPIC", &["17.36", "13.01", "23.04"]),
            ("SamKV, overwrite", &["23.13", "13.04", "35.27"]),
            ("SamKV, fusion", &["22.41", "12.47", "30.52"]),
        ],
        note: "",
    },
    Published {
        title: "Ablation, average F1",
        source: "SamKV, arXiv:2508.11661, ablation; 64 GB NPU, 200 samples a task",
        columns: &["Qwen2.5-3B", "Llama-3.1-8B"],
        rows: &[
            ("Full recompute", &["27.73", "21.94"]),
            ("No selection, no recompute", &["20.77", "14.68"]),
            ("Recompute", &["26.29", "21.56"]),
            ("Selection", &["18.57", "15.00"]),
            ("Selection and bias", &["19.96", "15.40"]),
            ("Selection and recompute", &["25.67", "22.21"]),
            ("All", &["27.30", "22.75"]),
        ],
        note: "",
    },
];

pub(super) const MORPH_KV: &[Published] = &[
    Published {
        title: "LongWriter, judge's score",
        source: "MorphKV, arXiv:2503.00979, LongWriter table; GH200, Transformers with FlashAttention 2, judge Mistral-Large",
        columns: &["Llama", "Mistral", "Phi-4", "Qwen2.5"],
        rows: &[
            ("Full", &["66.5", "81.3", "62.9", "66.2"]),
            ("H2O", &["68.5", "80.0", "61.5", "63.8"]),
            ("SnapKV", &["67.7", "81.1", "63.8", "68.4"]),
            ("MorphKV", &["69.5", "81.1", "64.7", "64.9"]),
        ],
        note: "KV against full attention: H2O about 1×, SnapKV 4×, MorphKV 0.25×.",
    },
    Published {
        title: "LongGenBench, mean accuracy",
        source: "MorphKV, arXiv:2503.00979, LongGenBench table; GH200, Transformers with FlashAttention 2",
        columns: &["Llama", "Mistral", "Qwen2.5"],
        rows: &[
            ("H2O", &["44", "50", "42"]),
            ("SnapKV", &["44", "49", "39"]),
            ("MorphKV", &["45", "52", "47"]),
        ],
        note: "KV against full attention: H2O 1.22×, SnapKV 5.01×, MorphKV 0.55×. The baselines hold a cache for every query head.",
    },
    Published {
        title: "MorphKV against the baselines",
        source: "MorphKV, arXiv:2503.00979; GH200, Transformers with FlashAttention 2",
        columns: &["Less memory", "More accuracy"],
        rows: &[("Against H2O", &["52.9 %", "18.2 %"]), ("Against SnapKV", &["88.1 %", "9.4 %"])],
        note: "The baselines hold a cache for every query head.",
    },
    Published {
        title: "Score when the output is four times as long",
        source: "MorphKV, arXiv:2503.00979; GH200, Transformers with FlashAttention 2",
        columns: &["Change"],
        rows: &[("MorphKV", &["−10 %"]), ("The baselines", &["−15 to −18 %"])],
        note: "",
    },
    Published {
        title: "LongBench, KV against full attention",
        source: "MorphKV, arXiv:2503.00979, LongBench; Llama, GH200",
        columns: &["KV"],
        rows: &[("SnapKV", &["0.42×"]), ("MorphKV", &["0.15×"])],
        note: "",
    },
    Published {
        title: "Fusion, mean over LongBench's tasks",
        source: "MorphKV, arXiv:2503.00979, table 4 (means of its columns); GH200",
        columns: &["Score"],
        rows: &[("max", &["30.99"]), ("sum", &["31.55"])],
        note: "The paper's text says that max is up to 1 % better; its table says the opposite.",
    },
    Published {
        title: "Window, mean accuracy on LongGenBench",
        source: "MorphKV, arXiv:2503.00979, tables 5 and 6; GH200",
        columns: &["Llama", "Mistral", "Qwen2.5"],
        rows: &[("R = 32", &["42", "50", "40"]), ("R = 200", &["45", "52", "47"])],
        note: "",
    },
];

pub(super) const CACHE_BLEND: &[Published] = &[Published {
    title: "CacheBlend against full recompute",
    source: "CacheBlend, EuroSys 2025, arXiv:2405.16444",
    columns: &["TTFT speed-up", "Throughput", "Recompute ratio", "Ratios without loss"],
    rows: &[("CacheBlend", &["2.2–3.3×", "2.8–5×", "15 %", "5–18 %"])],
    note: "",
}];
