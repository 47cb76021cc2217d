//! The playground: a page with its style and script.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// Content security policy of the page: its own style and script, and requests to this server.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
                                       connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
                                       frame-ancestors 'none'";

/// `GET /`
pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, include_str!("../page/index.html")).into_response()
}

/// `GET /page.css`
pub(super) async fn style() -> Response {
    ([(header::CONTENT_TYPE, "text/css; charset=utf-8")], include_str!("../page/page.css")).into_response()
}

/// `GET /page.js`
pub(super) async fn script() -> Response {
    ([(header::CONTENT_TYPE, "text/javascript; charset=utf-8")], include_str!("../page/page.js"))
        .into_response()
}
