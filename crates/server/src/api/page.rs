//! The playground: a page with its style and scripts.

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::app::App;

/// Content security policy of the page: its own style and scripts, and requests to this server.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
                                       connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                                       frame-ancestors 'none'";

const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Files that the page loads: path, content type and text.
const FILES: [(&str, &str, &str); 8] = [
    ("/page/page.css", CSS, include_str!("../page/page.css")),
    ("/page/page.js", SCRIPT, include_str!("../page/page.js")),
    ("/page/common.js", SCRIPT, include_str!("../page/common.js")),
    ("/page/documents.js", SCRIPT, include_str!("../page/documents.js")),
    ("/page/files.js", SCRIPT, include_str!("../page/files.js")),
    ("/page/conversation.js", SCRIPT, include_str!("../page/conversation.js")),
    ("/page/answer.js", SCRIPT, include_str!("../page/answer.js")),
    ("/page/markdown.js", SCRIPT, include_str!("../page/markdown.js")),
];

/// `GET /` and what the page there loads.
pub(super) fn routes() -> Router<App> {
    FILES.into_iter().fold(Router::new().route("/", get(page)), |router, (path, kind, text)| {
        let headers = [(header::CONTENT_TYPE, kind), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
        router.route(path, get(async move || (headers, text)))
    })
}

/// `GET /`
async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, include_str!("../page/index.html")).into_response()
}
